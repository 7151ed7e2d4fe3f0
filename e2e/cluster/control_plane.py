"""Runs etcd, kube-apiserver and kube-controller-manager as plain processes: real Kubernetes without pods, in seconds.

A test uses it like this (fixtures in `tests/conftest.py`, programs from `make tools`):

    def test_something(control_plane, namespace):   # one control plane per session or xdist worker,
        control_plane.kubeconfig                    # a fresh namespace per test; also the fixture `kubeconfig`

Or directly, also several at a time:

    with ControlPlane(hpa_sync_period_seconds=1) as control_plane:
        subprocess.run([binary("kubectl"), "--kubeconfig", control_plane.kubeconfig, "get", "ns"])

The control plane has validation and CEL, server-side apply, garbage collection, RBAC and quotas, and the controllers of
Deployments and HPAs. It has no scheduler, no nodes, no running pods, no cluster IPs and no DNS.

A test can serve an aggregated API itself on 127.0.0.1:PORT. It creates a Service of `type: ExternalName` with
`externalName: localhost`, and an APIService whose `service.port` is PORT. The API server then calls
https://localhost:PORT and expects a certificate for `<service>.<namespace>.svc` that is signed by the APIService's
`caBundle`. The API server presents the client certificate `control_plane.front_proxy`, signed by
`control_plane.front_proxy_authority`. As in every cluster, the ConfigMap
`kube-system/extension-apiserver-authentication` has this authority.

The processes die with the thread that called `start`, and `stop` removes the folder. The `local` cluster adds nodes to
this control plane. Each thread that needs a control plane must start its own.
"""

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority, KeyPair, write_kubeconfig, write_service_account_key
from e2e.cluster.paths import CACHE
from e2e.cluster.processes import Processes, Recorded, started_ticks

# Collect garbage less often: takes a seventh less CPU time and 200 MiB more memory.
_ENVIRONMENT = {"GOGC": "400"}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that differ between tests and the local cluster."""

    context: str = "conveyor-test"
    address: str = "127.0.0.1"
    service_cidr: str = "10.0.0.0/16"
    service_address: str = "10.0.0.1"
    aggregate_through_pods: bool = False
    die_with_parent: bool = True
    hpa_sync_period_seconds: float = 1
    hpa_downscale_stabilization_seconds: float = 5


class ControlPlane:
    """One control plane in its own folder. `kubeconfig` is valid after `start`."""

    def __init__(
        self,
        hpa_sync_period_seconds: float = 1,
        hpa_downscale_stabilization_seconds: float = 5,
        *,
        settings: Settings | None = None,
        folder: Path | None = None,
    ) -> None:
        self._settings = settings or Settings(
            hpa_sync_period_seconds=hpa_sync_period_seconds,
            hpa_downscale_stabilization_seconds=hpa_downscale_stabilization_seconds,
        )
        self.folder = folder or _make_folder()
        self.processes = Processes(self.folder, self._settings.die_with_parent)
        self.kubeconfig = self.folder / "kubeconfig"
        self._certificates = self.folder / "certificates"
        self._port_holder = _hold_free_port()
        self.port: int = self._port_holder.getsockname()[1]
        self._write_certificates()
        self._service_account = write_service_account_key(self._certificates)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server(self) -> str:
        return f"https://{self._settings.address}:{self.port}"

    def start(self) -> None:
        """Start the processes. Returns when the API answers and the controllers work (the default ServiceAccount
        exists)."""
        self.processes.start("etcd", self._etcd_command(), _ENVIRONMENT)
        self.processes.start("kube-apiserver", self._api_server_command(), _ENVIRONMENT)
        api = Api(self.kubeconfig)
        check = self.processes.check
        wait_until("kube-apiserver", lambda: api.reachable("/readyz"), check)
        self.processes.start("kube-controller-manager", self._controller_manager_command(), _ENVIRONMENT)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until("kube-controller-manager", lambda: api.reachable(account), check)

    def stop(self) -> None:
        """Stop the processes and remove the folder. May be called twice."""
        self._port_holder.close()
        if self.folder.exists():
            self.processes.stop(grace_seconds=0)  # nothing that they hold outlives the folder
            shutil.rmtree(self.folder)

    @property
    def etcd_socket(self) -> Path:
        """Where etcd serves gRPC, and its JSON gateway over HTTP."""
        return self.folder / "etcd.sock"

    def snapshot(self, folder: Path) -> None:
        """Copy etcd's data to `folder`. etcd stands still meanwhile."""
        (pid,) = [each.pid for each in self.processes.recorded() if each.name == "etcd"]
        os.kill(pid, signal.SIGSTOP)
        try:
            shutil.copytree(self.folder / "etcd", folder)
        finally:
            os.kill(pid, signal.SIGCONT)

    def restore(self, snapshot: Path) -> None:
        """Kill all processes, replace etcd's data with the copy, and start again.

        Resource versions are lower than before, as with `etcdutl snapshot restore` without `--bump-revision`.
        """
        self.processes.stop(grace_seconds=0)
        shutil.rmtree(self.folder / "etcd")
        shutil.copytree(snapshot, self.folder / "etcd")
        self.start()

    def replace_authority(self) -> None:
        """Kill all processes, and start again with a new authority and new certificates. Tokens stay valid.

        `kubeconfig` is written again.
        """
        self.processes.stop(grace_seconds=0)
        self._write_certificates()
        self.start()

    def issue_kubeconfig(self, file: str, user: str, group: str = "") -> Path:
        """Write a kubeconfig for another identity of this cluster, for example a node or one of the tests' users."""
        pair = self.authority.issue(file, user, group)
        path = self.folder / f"{file}.kubeconfig"
        return write_kubeconfig(path, self._settings.context, self.server, self.authority.certificate, pair)

    def _write_certificates(self) -> None:
        folder, settings = self._certificates, self._settings
        self.authority = Authority(folder, "cluster-authority")
        front = Authority(folder, "front-proxy-authority")
        self.front_proxy_authority: Path = front.certificate
        self.front_proxy: KeyPair = front.issue("front-proxy", "front-proxy-client")
        addresses = ("127.0.0.1", settings.address, settings.service_address)
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", *addresses)
        self._serving = self.authority.issue("api-server", "kube-apiserver", names=names)
        self._kubelet_client = self.authority.issue("kubelet-client", "kubelet-client", "system:masters")
        admin = self.authority.issue("admin", "admin", "system:masters")
        write_kubeconfig(self.kubeconfig, self._settings.context, self.server, self.authority.certificate, admin)
        self.issue_kubeconfig("controller-manager", "system:kube-controller-manager")

    @property
    def _etcd_url(self) -> str:
        return f"unix://{self.etcd_socket}"

    def _etcd_command(self) -> list[str | Path]:
        return [
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={self._etcd_url}",
            "--advertise-client-urls=http://127.0.0.1:2379",  # the flag requires a URL, which nobody calls
            "--listen-peer-urls=http://127.0.0.1:0",
            "--unsafe-no-fsync",  # the data does not outlive the machine
            "--log-level=warn",
        ]

    def _api_server_command(self) -> list[str | Path]:
        settings, (public, private) = self._settings, self._service_account
        return [
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={'127.0.0.1' if settings.address == '127.0.0.1' else '0.0.0.0'}",
            f"--secure-port={self.port}",
            "--permit-port-sharing",  # `_port_holder` reserves the port until the server has started
            f"--cert-dir={self._certificates}",
            f"--tls-cert-file={self._serving.certificate}",
            f"--tls-private-key-file={self._serving.key}",
            f"--client-ca-file={self.authority.certificate}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={private}",
            f"--service-cluster-ip-range={settings.service_cidr}",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={self._kubelet_client.certificate}",
            f"--kubelet-client-key={self._kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            *self._aggregation_flags(),
        ]

    def _aggregation_flags(self) -> list[str]:
        settings = self._settings
        reconciler = [] if settings.aggregate_through_pods else ["--endpoint-reconciler-type=none"]
        return [
            f"--requestheader-client-ca-file={self.front_proxy_authority}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={self.front_proxy.certificate}",
            f"--proxy-client-key-file={self.front_proxy.key}",
            # If true, ExternalName is rejected. If false, addresses in a pod network are not found.
            f"--enable-aggregator-routing={str(settings.aggregate_through_pods).lower()}",
            f"--advertise-address={settings.address}",
            *reconciler,
        ]

    def _controller_manager_command(self) -> list[str | Path]:
        settings, kubeconfig = self._settings, self.folder / "controller-manager.kubeconfig"
        return [
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--secure-port=0",
            "--leader-elect=false",
            # With the default of 20 calls a second, creating the tokens of its own controllers takes five seconds.
            "--kube-api-qps=400",
            "--kube-api-burst=800",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._service_account[1]}",
            f"--root-ca-file={self.authority.certificate}",
            f"--flex-volume-plugin-dir={self.folder}/volume-plugins",  # the controller manager creates this folder
            f"--horizontal-pod-autoscaler-sync-period={settings.hpa_sync_period_seconds}s",
            f"--horizontal-pod-autoscaler-downscale-stabilization={settings.hpa_downscale_stabilization_seconds}s",
        ]


def _make_folder() -> Path:
    """Make a folder named after this process. Also remove the folders of processes that no longer exist."""
    base = CACHE / "control-planes"
    base.mkdir(parents=True, exist_ok=True)
    for left in base.iterdir():
        pid, ticks, _ = left.name.split("-")
        if not Recorded("owner", int(pid), int(ticks)).alive():
            with contextlib.suppress(FileNotFoundError):  # another process may be removing it too
                Processes(left, die_with_parent=True).stop(grace_seconds=0)
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{started_ticks(os.getpid())}-", dir=base))


def _hold_free_port() -> socket.socket:
    """Return a bound socket that never listens. It reserves the port, which only a server with SO_REUSEPORT shares."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    return holder
