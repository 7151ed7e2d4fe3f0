"""Adds a second node to the running local cluster, and takes its network or its power away.

Called by the stories of `e2e/test_two_nodes.py`, and by `local`, which removes the node with the cluster. The node has
a network namespace, a control group and a containerd of its own, in the folder `second` of the cluster's folder. Its
first start links the pause image only: `load` brings the others.
"""

import shutil
from functools import cached_property
from pathlib import Path

from e2e.cluster import cgroups, gpus, mounts, network, programs
from e2e.cluster.api import Api, wait_until
from e2e.cluster.containerd import Containerd, remove_shim_sockets
from e2e.cluster.node import PAUSE_IMAGE, Command, Node, Place
from e2e.cluster.processes import Processes

USER = "second"  # the kubeconfig of the node, which `local` issues
NAME = "conveyor-second"


class SecondNode:
    """The second node of the cluster in the folder `cluster`."""

    def __init__(self, cluster: Path) -> None:
        self._cluster = cluster
        self._folder = cluster / "second"
        self._network = self._folder / "network"
        place = Place(
            NAME,
            network.SECOND_ADDRESS,
            network.SECOND_POD_CIDR,
            f"{cgroups.NAME}/second",
            image_store=self._folder / "images",
        )
        self._cgroup = place.cgroup
        self._node = Node(self._folder, cluster / "certificates" / "cluster-authority.crt", place)
        self.containerd_socket = self._node.containerd_socket

    def start(self) -> None:
        """Turn the power on. Returns when the node is ready. Images and pods of an earlier start are still there."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        for user, file in ((USER, "node"), ("proxy", "proxy")):
            shutil.copy(self._cluster / f"{user}.kubeconfig", self._folder / f"{file}.kubeconfig")
        cgroups.create(self._cgroup)
        network.create_second(self._network)
        processes, runtime = self._processes, Containerd("ctr", "--address", self.containerd_socket)
        processes.start("containerd", self._inside(self._node.containerd()))
        wait_until("containerd", runtime.ready, processes.check)
        runtime.import_pause_image(PAUSE_IMAGE)
        processes.start("kubelet", self._inside(self._node.kubelet()))
        processes.start("kube-proxy", self._inside(self._node.proxy()))
        wait_until("the second node", self.is_ready, processes.check)
        gpus.fake(self._cluster / "kubeconfig")

    def is_ready(self) -> bool:
        """Return whether the API server has a recent report of the node."""
        api, path = Api(self._cluster / "kubeconfig"), f"/api/v1/nodes/{NAME}"
        conditions = api.get(path)["status"].get("conditions", []) if api.reachable(path) else []
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def disconnect(self) -> None:
        """Pull the cable. What runs on the node goes on."""
        network.connect_second(False)

    def connect(self) -> None:
        network.connect_second(True)

    def lose_power(self) -> None:
        """End everything on the node at once. Others get no packet about it. Only disks keep what they have."""
        network.delete_second()
        self._processes.stop(grace_seconds=0)
        cgroups.delete(self._cgroup)
        remove_shim_sockets(self._folder / "containerd")
        mounts.remove_below(self._folder)
        for folder in ("containerd", "runc"):
            shutil.rmtree(self._folder / folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove every trace of the node on this machine. Does nothing if there is none."""
        if self._folder.exists():
            self.lose_power()
            shutil.rmtree(self._folder)

    @cached_property
    def _processes(self) -> Processes:
        return Processes(self._folder, die_with_parent=False)

    def _inside(self, command: Command) -> Command:
        program, *arguments = command
        return ["nsenter", f"--net={self._network}", programs.path(str(program)), *arguments]
