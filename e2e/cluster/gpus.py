"""Adds fake GPUs to nodes by writing the capacity into the Node's status, as a device plugin does.

Called by the providers after the node is ready. The kubelet keeps resources that it does not own. A kubelet that
registers again loses them, so a repeated `up` writes them again.
"""

from pathlib import Path

from e2e.cluster.api import Api

RESOURCE = "nvidia.com/gpu"
LABEL = "nvidia.com/gpu.present"
COUNT = 16


def fake(kubeconfig: Path) -> None:
    """Give `COUNT` GPUs to every node that has NVIDIA's label."""
    api = Api(kubeconfig)
    field = RESOURCE.replace("/", "~1")
    operations = [
        {"op": "add", "path": f"/status/{part}/{field}", "value": str(COUNT)} for part in ("capacity", "allocatable")
    ]
    for node in api.get(f"/api/v1/nodes?labelSelector={LABEL}%3Dtrue")["items"]:
        api.patch_json(f"/api/v1/nodes/{node['metadata']['name']}/status", operations)
