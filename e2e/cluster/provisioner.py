"""Provides volumes for the local cluster's claims: its default StorageClass, whose volumes are folders of the node.

`python -m e2e.cluster.provisioner KUBECONFIG FOLDER`: a process of the cluster, started by `local`. kind has a
provisioner of its own, and provisioners from elsewhere would need an image. Each volume is a folder in FOLDER that
everybody may write to, because Kubernetes does not change the owner of such folders. It is deleted with its claim.
"""

import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from e2e.cluster.api import Api, ApiError

CLASS: Final = "standard"
_PROVISIONER: Final = "conveyor.dev/host-path"
_DEFAULT: Final = {"storageclass.kubernetes.io/is-default-class": "true"}
# Without it, the controller manager would try to delete the volume itself.
_PROVISIONED: Final = {"pv.kubernetes.io/provisioned-by": _PROVISIONER}
_VOLUMES: Final = "/api/v1/persistentvolumes"
_PAUSE_SECONDS: Final = 1.0

Json = dict[str, Any]


def create_class(api: Api) -> None:
    body = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": _DEFAULT},
        "provisioner": _PROVISIONER,
    }
    api.apply(f"/apis/storage.k8s.io/v1/storageclasses/{CLASS}", body)


def step(api: Api, folder: Path) -> None:
    """Create a volume for each claim that has none, and delete the volumes whose claims are gone."""
    volumes = api.get(_VOLUMES)["items"]
    named = {_claim_key(volume["spec"].get("claimRef") or {}) for volume in volumes}  # some are bound by hand
    for claim in api.get("/api/v1/persistentvolumeclaims")["items"]:
        spec, metadata = claim["spec"], claim["metadata"]
        is_ours = spec.get("storageClassName") == CLASS and not spec.get("volumeName")
        if is_ours and not metadata.get("deletionTimestamp") and _claim_key(metadata) not in named:
            volume = build_volume(claim, folder)
            path = Path(volume["spec"]["hostPath"]["path"])
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)
            api.create(_VOLUMES, volume)
    for volume in volumes:
        is_released = volume["spec"].get("storageClassName") == CLASS and volume["status"].get("phase") == "Released"
        if is_released and volume["metadata"].get("annotations", {}).items() >= _PROVISIONED.items():
            shutil.rmtree(folder / volume["metadata"]["name"], ignore_errors=True)
            api.delete(f"{_VOLUMES}/{volume['metadata']['name']}")


def build_volume(claim: Json, folder: Path) -> Json:
    """Return the volume for a claim, bound to it. Pure."""
    metadata, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{metadata['uid']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": _PROVISIONED},
        "spec": {
            "accessModes": spec["accessModes"],
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                **{key: metadata[key] for key in ("namespace", "name", "uid")},
            },
            "hostPath": {"path": str(folder / name), "type": "Directory"},
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
        },
    }


def _claim_key(reference: Json) -> tuple[str, str]:
    return reference.get("namespace", ""), reference.get("name", "")


def main(kubeconfig: Path, folder: Path) -> None:
    api = Api(kubeconfig)
    create_class(api)
    while True:
        try:
            step(api, folder)
        except (ApiError, OSError) as error:  # an object has changed meanwhile, or the API server is away
            print(error, file=sys.stderr, flush=True)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
