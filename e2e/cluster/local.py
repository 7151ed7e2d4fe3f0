"""The `local` provider: a whole cluster of plain processes on this machine, without an outer container.

Called by the command line. `keeper` runs this module as the parent of the cluster's processes. All of it is in
`<cache>/local`, except the image store, which outlives the cluster. `down` needs only that folder and the fixed names
of `network` and `cgroups`, so it works after any crash.
"""

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import cgroups, gpus, images, keeper, mounts, network, programs, second, sysctls
from e2e.cluster.api import Api, wait_until
from e2e.cluster.containerd import Containerd, remove_shim_sockets
from e2e.cluster.control_plane import ControlPlane, Settings
from e2e.cluster.node import FIRST, PAUSE_IMAGE, Node
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.processes import Processes, Recorded

CONTEXT = "conveyor-local"
FOLDER = CACHE / "local"
KUBECONFIG = FOLDER / "kubeconfig"
CONTAINERD_SOCKET = FOLDER / "containerd.sock"

_SETTINGS = Settings(
    context=CONTEXT,
    address=network.NODE_ADDRESS,
    service_cidr=network.SERVICE_CIDR,
    service_address=network.SERVICE_ADDRESS,
    aggregate_through_pods=True,
    die_with_parent=False,
    # Kubernetes' defaults are 15 and 300 s. Shorter times keep the demo short.
    hpa_sync_period_seconds=5,
    hpa_downscale_stabilization_seconds=10,
)
# The kubelet requires this folder. It is removed only if this cluster created it.
_KUBELET_FOLDER = Path("/var/lib/kubelet")
_MARK = "made-by-conveyor"
_LOG_LINKS = Path("/var/log/containers")
# The kubelet, containerd and the CNI plugins create these, whatever folders they are configured to use.
_FIXED_FOLDERS = [_LOG_LINKS] + [
    Path(path) for path in ("/run/containerd/s", "/run/containerd", "/var/lib/cni/results", "/var/lib/cni")
]


class NotStarted(RuntimeError):
    """`up` failed. The message names the logs."""


class TracesLeft(RuntimeError):
    """`down` could not remove all of the cluster. The message names what is left."""


def up() -> None:
    """Bring the cluster up. An intact cluster stays; an incomplete one is removed first."""
    if running():
        gpus.fake(KUBECONFIG)
        return
    programs.require(*programs.CLUSTER)
    down()
    print("cluster: starting Kubernetes (HPA: sync every 5 s, scale-down after 10 s) ...", flush=True)
    if not keeper.launch("e2e.cluster.local"):
        raise NotStarted(f"it did not start; logs are in {FOLDER}/logs until the next `up` or `down`")


def down() -> None:
    """Remove every trace of the cluster. Does nothing if there is none."""
    processes = Processes(FOLDER, die_with_parent=False)
    recorded = processes.recorded()
    second.SecondNode(FOLDER).remove()
    processes.stop([keeper.NAME], grace_seconds=30)  # it stops the other processes and waits for them
    _stop_processes()  # if the keeper was killed
    network.delete()
    sysctls.restore(FOLDER)
    remove_shim_sockets(FOLDER / "containerd")
    mounts.remove_below(FOLDER)
    _remove_kubelet_folder()
    _remove_log_links()
    _remove_empty_folders()
    shutil.rmtree(FOLDER)
    with contextlib.suppress(TimeoutError):  # the kernel removes the network of ended pods a little later
        wait_until("the end", lambda: not left(recorded), timeout_seconds=30)
    if traces := left(recorded):
        raise TracesLeft(f"still there: {', '.join(traces)}")


def left(processes: Sequence[Recorded] = ()) -> list[str]:
    """Return the names of all parts of a cluster that exist, and of its living processes. Empty after `down`."""
    folders = [FOLDER, *([_KUBELET_FOLDER] if (_KUBELET_FOLDER / _MARK).exists() else [])]
    return [
        *(f"process {process.pid} ({process.name})" for process in processes if process.alive()),
        *cgroups.left(),
        *network.left(),
        *(f"mount {point}" for point in mounts.below(FOLDER)),
        *(f"link {link}" for link in _log_links()),
        *(f"folder {folder}" for folder in folders if folder.exists()),
    ]


def exists() -> bool:
    """Return whether `down` has something to remove: a cluster, or the remains of one after a crash."""
    return FOLDER.exists() or network.exists()


def running() -> bool:
    if not KUBECONFIG.exists():
        return False
    recorded = Processes(FOLDER, die_with_parent=False).recorded()
    complete = {"etcd", "kubelet", "coredns"} <= {process.name for process in recorded}
    return complete and all(process.alive() for process in recorded) and Api(KUBECONFIG).reachable("/readyz")


def _start() -> None:
    """Start everything. Runs in the keeper."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sysctls.note(FOLDER)
    cgroups.create()
    network.create()
    control_plane = ControlPlane(settings=_SETTINGS, folder=FOLDER)
    node = Node(FOLDER, control_plane.authority.certificate)
    for file, user, group in (
        ("scheduler", "system:kube-scheduler", ""),
        ("proxy", "system:kube-proxy", ""),
        ("node", f"system:node:{FIRST.name}", "system:nodes"),
        (second.USER, f"system:node:{second.NAME}", "system:nodes"),
    ):
        control_plane.issue_kubeconfig(file, user, group)
    _mark_kubelet_folder()
    processes = control_plane.processes
    processes.record(keeper.NAME)
    _start_containerd(processes, node)
    control_plane.start()
    processes.start("kubelet", node.kubelet())
    processes.start("kube-scheduler", node.scheduler())
    processes.start("kube-proxy", node.proxy())
    processes.start("coredns", node.dns())
    command = ("python", "-m", "e2e.cluster.provisioner", KUBECONFIG, FOLDER / "volumes")
    processes.start("provisioner", command, {"PYTHONPATH": str(REPOSITORY)})
    api = Api(KUBECONFIG)
    wait_until("the node", lambda: _node_ready(api), processes.check)
    gpus.fake(KUBECONFIG)


def _stop_processes() -> None:
    """Stop all processes but the keeper, and all containers. Programs that restart others are stopped first."""
    processes = Processes(FOLDER, die_with_parent=False)
    processes.stop(["kubelet"], grace_seconds=0)
    processes.stop(["containerd"])  # gently, because its image store is kept
    if others := [process.name for process in processes.recorded() if process.name != keeper.NAME]:
        processes.stop(others, grace_seconds=0)
    cgroups.delete()


def _start_containerd(processes: Processes, node: Node) -> None:
    runtime = Containerd("ctr", "--address", node.containerd_socket)
    processes.start("containerd", node.containerd())
    wait_until("containerd", runtime.ready, processes.check)
    runtime.import_pause_image(PAUSE_IMAGE)
    if runtime.forget_containers():  # containerd has read the records at its start
        processes.stop(["containerd"])
        processes.start("containerd", node.containerd())
        wait_until("containerd", runtime.ready, processes.check)
    # No pod runs yet, so only the images loaded last are useful. The others may take gigabytes.
    runtime.keep_images([PAUSE_IMAGE, *(image.loaded_last for image in images.IMAGES.values())])


def _node_ready(api: Api) -> bool:
    nodes = api.get("/api/v1/nodes")["items"]
    conditions = [condition for node in nodes for condition in node["status"].get("conditions", [])]
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _mark_kubelet_folder() -> None:
    if not _KUBELET_FOLDER.exists():
        _KUBELET_FOLDER.mkdir()
        (_KUBELET_FOLDER / _MARK).touch()


def _remove_kubelet_folder() -> None:
    if (_KUBELET_FOLDER / _MARK).exists():
        shutil.rmtree(_KUBELET_FOLDER)


def _remove_log_links() -> None:
    for link in _log_links():
        link.unlink()


def _log_links() -> list[Path]:
    links = [path for path in _LOG_LINKS.glob("*") if path.is_symlink()]
    return [link for link in links if str(link.readlink()).startswith(f"{FOLDER}/")]


def _remove_empty_folders() -> None:
    for folder in _FIXED_FOLDERS:
        with contextlib.suppress(OSError):  # the folder does not exist, or has files of others
            folder.rmdir()


if __name__ == "__main__":
    keeper.keep(_start, _stop_processes, FOLDER / "logs" / "keeper.log", int(sys.argv[1]))
