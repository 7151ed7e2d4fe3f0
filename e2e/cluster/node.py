"""Configures the programs that turn a control plane into a cluster with nodes: their files and flags.

Called by `local` and `second`, which start the programs. Writes files into the node's folder and starts nothing.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import cgroups, gpus, network
from e2e.cluster.paths import CACHE
from e2e.cluster.tools import module_hash

PAUSE_IMAGE = f"docker.io/conveyor/pause:{module_hash()}"

Command = list[str | Path]


@dataclass(frozen=True, slots=True)
class Place:
    """What differs between nodes: name, addresses, control group, and the folder of the image store."""

    name: str
    address: str
    pod_cidr: str
    cgroup: str
    image_store: Path


# The image store outlives the cluster, so that a new cluster does not import gigabytes again.
FIRST = Place(
    "conveyor-local", network.NODE_ADDRESS, network.FIRST_POD_CIDR, cgroups.NAME, image_store=CACHE / "containerd"
)


class Node:
    """The configuration of the node's programs in `folder`, where the caller writes their kubeconfigs."""

    def __init__(self, folder: Path, authority: Path, place: Place = FIRST) -> None:
        self._folder = folder
        self._authority = authority
        self._place = place
        self.containerd_socket = folder / "containerd.sock"

    def containerd(self) -> Command:
        (self._folder / "cni").mkdir(exist_ok=True)
        cni = network.cni_configuration(self._folder / "cni-addresses", self._place.pod_cidr)
        (self._folder / "cni" / "10-conveyor.conflist").write_text(json.dumps(cni))
        config = self._folder / "containerd.toml"
        config.write_text(self._containerd_configuration())
        return ["containerd", "--config", config]

    def scheduler(self) -> Command:
        client = {"kubeconfig": str(self._kubeconfig("scheduler"))}
        content = {"leaderElection": {"leaderElect": False}, "clientConnection": client}
        config = self._write("kubescheduler.config.k8s.io/v1", "KubeSchedulerConfiguration", content)
        return ["kube-scheduler", f"--config={config}", "--secure-port=0"]

    def kubelet(self) -> Command:
        content = self._kubelet_configuration()
        config = self._write("kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", content)
        return [
            "kubelet",
            f"--config={config}",
            f"--kubeconfig={self._kubeconfig('node')}",
            f"--hostname-override={self._place.name}",
            f"--node-ip={self._place.address}",
            f"--node-labels={gpus.LABEL}=true",
            f"--root-dir={self._folder}/kubelet",
            f"--cert-dir={self._folder}/kubelet/pki",
        ]

    def proxy(self) -> Command:
        content = {
            "mode": "nftables",
            "clusterCIDR": network.POD_CIDR,
            "clientConnection": {"kubeconfig": str(self._kubeconfig("proxy"))},
            "hostnameOverride": self._place.name,
            # Do not change the machine's settings.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": f"{self._place.address}:10256",
            "metricsBindAddress": f"{self._place.address}:10249",
            "nodePortAddresses": [f"{self._place.address}/32"],
        }
        config = self._write("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration", content)
        return ["kube-proxy", f"--config={config}"]

    def dns(self) -> Command:
        """Return the command for CoreDNS on the node's address, as a plain process. So names work before the first pod
        runs."""
        config = self._folder / "Corefile"
        upstream = "forward . /etc/resolv.conf" if _has_name_server() else ""
        config.write_text(
            f".:53 {{\n bind {network.NODE_ADDRESS}\n errors\n cache 5\n"
            f" kubernetes cluster.local in-addr.arpa {{\n  kubeconfig {self._folder}/kubeconfig\n  ttl 1\n }}\n"
            f" {upstream}\n}}\n"
        )
        return ["coredns", "-conf", config]

    def _kubeconfig(self, user: str) -> Path:
        return self._folder / f"{user}.kubeconfig"

    def _write(self, version: str, kind: str, content: dict[str, Any]) -> Path:
        path = self._folder / f"{kind}.json"
        path.write_text(json.dumps({"apiVersion": version, "kind": kind, **content}, indent=1))
        return path

    def _kubelet_configuration(self) -> dict[str, Any]:
        folder = self._folder
        (folder / "resolv.conf").write_text(f"nameserver {network.NODE_ADDRESS}\n")
        return {
            "authentication": {"x509": {"clientCAFile": str(self._authority)}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "address": self._place.address,
            "healthzBindAddress": self._place.address,
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._place.cgroup}",
            "makeIPTablesUtilChains": False,  # the chains are not needed, and would remain
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [network.NODE_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(folder / "resolv.conf"),
            "podLogsDir": str(folder / "pod-logs"),
            "volumePluginDir": str(folder / "volume-plugins"),
            # The disk of a development machine may be nearly full: do not delete images or evict pods for that.
            "imageGCHighThresholdPercent": 100,
            # Otherwise an image that was pulled from a registry would be pulled again for its local name.
            "imagePullCredentialsVerificationPolicy": "NeverVerify",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        }

    def _containerd_configuration(self) -> str:
        folder, cri = self._folder, '[plugins."io.containerd.grpc.v1.cri"'
        return f"""\
version = 2
# It would leave a socket in /var/run. Debian's containerd has no such plugin, and does not mind.
disabled_plugins = ["io.containerd.nri.v1.nri"]
root = "{self._place.image_store}"
state = "{folder}/containerd"
[grpc]
  address = "{self.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
{cri}.cni]
  bin_dir = "{network.CNI_PLUGINS}"
  conf_dir = "{folder}/cni"
{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
{cri}.containerd.runtimes.runc.options]
  Root = "{folder}/runc"
  ShimCgroup = "/{cgroups.shims(self._place.cgroup)}"
"""


def _has_name_server() -> bool:
    lines = Path("/etc/resolv.conf").read_text().splitlines()
    return any(line.startswith("nameserver") for line in lines)
