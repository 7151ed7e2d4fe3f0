"""Builds a claim for a given folder of the node, for the demo's model and for stories that read what pods write.

Pure; the caller applies the manifests.
"""

from typing import Any


def host_path_claim(namespace: str, name: str, path: str) -> list[dict[str, Any]]:
    """Return a PersistentVolume for `path` on the node, and a claim `name` that is bound only to it.

    With kind, `path` is inside the node's container, where kind's configuration mounts the cache folder.
    """
    volume = f"{namespace}-{name}"
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **shared,
                "capacity": {"storage": "10Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace, "name": name},
                "hostPath": {"path": path, "type": "DirectoryOrCreate"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"namespace": namespace, "name": name},
            "spec": {**shared, "volumeName": volume, "resources": {"requests": {"storage": "10Gi"}}},
        },
    ]
