"""The `kind` provider: nodes in containers, if a Docker daemon and kind are installed (hosted CI, laptops).

Called by the command line. There is one control-plane node, which also runs ordinary pods, and one worker with the
label and the taint of an NVIDIA GPU node.
"""

import functools
import json
import os
import shutil
from typing import Any

from e2e.cluster import gpus, programs
from e2e.cluster.paths import CACHE

NAME = "conveyor"
CONTEXT = f"kind-{NAME}"
KUBECONFIG = CACHE / "kind" / "kubeconfig"
# This port of the machine leads to a node, and from there to the gateway if the chart has these values.
GATEWAY_PORT, _NODE_PORT = 18080, 30080
CHART_VALUES = ("gateway.service.type=NodePort", f"gateway.service.nodePort={_NODE_PORT}")
# For each image, the node that gets it. Only engines with a GPU tolerate the worker's taint. Engines without a GPU
# cannot run on the other node either, because it does not get their image: that would take 12 GB more.
NODES = {"control": f"{NAME}-control-plane", "engine": f"{NAME}-worker"}

_AUTOSCALER = {
    # Kubernetes' defaults are 15 and 300 s. Shorter times keep the demo short.
    "horizontal-pod-autoscaler-sync-period": "5s",
    "horizontal-pod-autoscaler-downscale-stabilization": "10s",
}


@functools.cache
def docker_answers() -> bool:
    """Return whether the Docker daemon answers. The client may be installed without a daemon."""
    return programs.found("docker") is not None and programs.run("docker", "info", capture_output=True).returncode == 0


def available() -> bool:
    """Return whether the Docker daemon and kind work."""
    if programs.found("kind") is None or not docker_answers():
        return False
    return programs.run("kind", "version", capture_output=True).returncode == 0


def is_requested() -> bool:
    """Return whether a new cluster is to be kind's: CLUSTER is `kind`, or it is not set and kind works."""
    choice = os.environ.get("CLUSTER", "")
    return choice == "kind" or (not choice and available())


def exists() -> bool:
    if not available():
        return False
    names = programs.run("kind", "get", "clusters", capture_output=True, text=True, check=True).stdout
    return NAME in names.split()


def running() -> bool:
    return KUBECONFIG.exists() and exists()


def up() -> None:
    if not running():
        down()
        KUBECONFIG.parent.mkdir(parents=True, exist_ok=True)
        create = ("create", "cluster", "--name", NAME, "--kubeconfig", KUBECONFIG, "--config=-")
        programs.run("kind", *create, input=json.dumps(configuration()), text=True, check=True)
    gpus.fake(KUBECONFIG)


def down() -> None:
    programs.run("kind", "delete", "cluster", "--name", NAME, check=True)
    shutil.rmtree(KUBECONFIG.parent, ignore_errors=True)


def configuration() -> dict[str, Any]:
    """Return kind's configuration as JSON, which is also YAML."""
    taint = {"key": gpus.RESOURCE, "value": "present", "effect": "NoSchedule"}
    worker = {
        "role": "worker",
        "labels": {gpus.LABEL: "true"},
        "kubeadmConfigPatches": [_taints_patch("JoinConfiguration", [taint])],
        # The only folder that a hostPath volume may name: the cache folder, which has the demo's model.
        "extraMounts": [{"hostPath": str(CACHE), "containerPath": str(CACHE)}],
    }
    control = {
        "role": "control-plane",
        # kind removes kubeadm's own taint only if there is no second node.
        "kubeadmConfigPatches": [_taints_patch("InitConfiguration", []), *_autoscaler_patches()],
        "extraPortMappings": [{"containerPort": _NODE_PORT, "hostPort": GATEWAY_PORT, "listenAddress": "127.0.0.1"}],
    }
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [control, worker]}


def _taints_patch(kind: str, taints: list[dict[str, str]]) -> str:
    """Return a patch with all taints of a node. All versions of kubeadm's API spell them alike."""
    return json.dumps({"kind": kind, "nodeRegistration": {"taints": taints}})


def _autoscaler_patches() -> list[str]:
    """Return one patch for each version of kubeadm's API, because they spell arguments differently. kind applies the
    right one."""
    listed = [{"name": name, "value": value} for name, value in _AUTOSCALER.items()]
    return [
        json.dumps(
            {
                "apiVersion": f"kubeadm.k8s.io/{version}",
                "kind": "ClusterConfiguration",
                "controllerManager": {"extraArgs": arguments},
            }
        )
        for version, arguments in (("v1beta3", _AUTOSCALER), ("v1beta4", listed))
    ]
