"""The `kind` provider: nodes in containers, where a Docker daemon and kind are at hand (hosted CI, laptops).

Called by the command line. One control-plane node that also takes ordinary pods, and one worker that looks like a GPU
node: NVIDIA's label and taint.
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
# A port of this machine leads to one of the nodes, and there to the gateway if the chart gets these values.
GATEWAY_PORT, _NODE_PORT = 18080, 30080
CHART_VALUES = ("gateway.service.type=NodePort", f"gateway.service.nodePort={_NODE_PORT}")
# The node whose pods run an image, as kind names it: the taint keeps all but the engines from the worker, and an engine
# without a GPU has no place here. On both nodes the engine's image would take 12 GB more.
NODES = {"control": f"{NAME}-control-plane", "engine": f"{NAME}-worker"}

_AUTOSCALER = {
    # Kubernetes' own are 15 and 300 s; shorter ones keep the demo short.
    "horizontal-pod-autoscaler-sync-period": "5s",
    "horizontal-pod-autoscaler-downscale-stabilization": "10s",
}


@functools.cache
def docker_answers() -> bool:
    """Return whether the Docker daemon answers, because the client may be installed without a daemon."""
    return programs.found("docker") is not None and programs.run("docker", "info", capture_output=True).returncode == 0


def available() -> bool:
    """Return whether the Docker daemon and kind work."""
    if programs.found("kind") is None or not docker_answers():
        return False
    return programs.run("kind", "version", capture_output=True).returncode == 0


def wanted() -> bool:
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
    """kind's configuration; JSON is YAML."""
    taint = {"key": gpus.RESOURCE, "value": "present", "effect": "NoSchedule"}
    worker = {
        "role": "worker",
        "labels": {gpus.LABEL: "true"},
        "kubeadmConfigPatches": [_taints_patch("JoinConfiguration", [taint])],
        # What a hostPath volume may name: the cache folder, where the demo's model lies.
        "extraMounts": [{"hostPath": str(CACHE), "containerPath": str(CACHE)}],
    }
    control = {
        "role": "control-plane",
        # kind takes kubeadm's own taint away only where there is no second node.
        "kubeadmConfigPatches": [_taints_patch("InitConfiguration", []), *_autoscaler_patches()],
        "extraPortMappings": [{"containerPort": _NODE_PORT, "hostPort": GATEWAY_PORT, "listenAddress": "127.0.0.1"}],
    }
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [control, worker]}


def _taints_patch(kind: str, taints: list[dict[str, str]]) -> str:
    """All of a node's taints, for every version of kubeadm's API: they spell these alike."""
    return json.dumps({"kind": kind, "nodeRegistration": {"taints": taints}})


def _autoscaler_patches() -> list[str]:
    """One patch per version of kubeadm's API, because they spell arguments differently; kind takes the fitting one."""
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
