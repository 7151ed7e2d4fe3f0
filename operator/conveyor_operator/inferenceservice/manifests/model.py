"""Builds the model's volume and its mount, and the claim for a cache. Pure."""

from typing import Any

from conveyor_api import names
from conveyor_api.model import Cache, Mounted, VolumeModel
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.loop.owner import Object, Owner, build_metadata

_EMPTY_DIR_SIZE = "200Gi"  # above any model for one device; without a limit, a download could fill a disk


def build_model_mount(spec: InferenceServiceSpec) -> Object:
    """Return the mount of the model's volume. A claim or image that already contains the model is mounted read-only."""
    source = spec.model.source
    if not isinstance(source, Mounted):
        return {"name": names.MODEL_VOLUME, "mountPath": names.MODELS_PATH}
    path = names.VOLUME_MODELS_PATH if isinstance(source, VolumeModel) else names.IMAGE_MODELS_PATH
    return {"name": names.MODEL_VOLUME, "mountPath": path, "readOnly": True}


def build_model_volume(owner: Owner, spec: InferenceServiceSpec) -> Object:
    source, cache = spec.model.source, spec.model.cache
    if isinstance(source, Mounted):
        return build_mounted_volume(names.MODEL_VOLUME, source)
    if cache.strategy == "PVC":
        claim_name = cache.claim_name or names.model_claim_name(owner.name)
        return {"name": names.MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim_name}}
    return build_download_volume(names.MODEL_VOLUME, cache)


def build_mounted_volume(name: str, source: Mounted) -> Object:
    """Return the volume of a claim or an image that already contains the model or the adapter."""
    if isinstance(source, VolumeModel):
        return {"name": name, "persistentVolumeClaim": {"claimName": source.claim_name, "readOnly": True}}
    return {"name": name, "image": {"reference": source.reference, "pullPolicy": "IfNotPresent"}}


def build_download_volume(name: str, cache: Cache) -> Object:
    """Return the volume into which each pod downloads."""
    return {"name": name, "emptyDir": {"sizeLimit": str(cache.size or _EMPTY_DIR_SIZE)}}


def needs_claim(spec: InferenceServiceSpec) -> bool:
    """Return whether Conveyor creates a claim for the service."""
    return spec.model.cache.strategy == "PVC" and spec.model.cache.claim_name is None


def build_claim(owner: Owner, spec: InferenceServiceSpec, access_mode: str) -> Object:
    """Return the claim for the cache. The caller passes an existing claim's access mode, because it is immutable."""
    cache = spec.model.cache
    content: dict[str, Any] = {
        "accessModes": [access_mode],
        "resources": {"requests": {"storage": str(cache.size)}},
    }
    if cache.storage_class_name is not None:
        content["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": build_metadata(owner, names.model_claim_name(owner.name)),
        "spec": content,
    }
