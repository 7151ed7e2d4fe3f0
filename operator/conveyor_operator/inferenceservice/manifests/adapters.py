"""Chooses the volumes of LoRA adapters, and where containers mount them. Pure.

An adapter in a claim or an image is mounted read-only, once for each adapter. A downloaded adapter is in the model's
volume, with the model's cache. If the model itself is mounted, an emptyDir contains the downloaded adapters.

A pod has one volume for each claim and each image, even if several adapters or the model use it. Adapters are sorted by
name, so that their order in the spec does not matter.
"""

from dataclasses import dataclass

from conveyor_api import names
from conveyor_api.adapters import Adapter
from conveyor_api.model import Mounted
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.manifests.model import (
    build_download_volume,
    build_model_mount,
    build_model_volume,
    build_mounted_volume,
)
from conveyor_operator.loop.owner import Object, Owner


@dataclass(frozen=True, slots=True)
class AdapterVolumes:
    """The volumes that pods need in addition to the model's, and each adapter with the mount of its volume."""

    volumes: tuple[Object, ...]
    mounts: tuple[tuple[Adapter, Object], ...]

    def build_engine_mounts(self, model_mount: Object) -> list[Object]:
        """Return the mounts of the engine's container in addition to the model's, each one once."""
        found: list[Object] = []
        for _, mount in self.mounts:
            read_only = mount | {"readOnly": True}
            if mount["mountPath"] != model_mount["mountPath"] and read_only not in found:
                found.append(read_only)
        return found


def sort_adapters(spec: InferenceServiceSpec) -> list[Adapter]:
    return sorted(spec.adapters, key=lambda adapter: adapter.name)


def plan_adapter_volumes(owner: Owner, spec: InferenceServiceSpec) -> AdapterVolumes:
    known, mounts = [build_model_volume(owner, spec)], []
    for adapter in sort_adapters(spec):
        source = adapter.source
        if isinstance(source, Mounted):
            wanted = build_mounted_volume(f"{names.ADAPTER_VOLUME}-{len(known) - 1}", source)
            mount = {"mountPath": adapter.mount_path, "readOnly": True}
        elif isinstance(spec.model.source, Mounted):
            wanted = build_download_volume(names.ADAPTERS_VOLUME, spec.model.cache)
            mount = {"mountPath": names.FETCHED_ADAPTERS_PATH}
        else:
            mounts.append((adapter, build_model_mount(spec)))
            continue
        volume = next((each for each in known if _find_content(each) == _find_content(wanted)), None)
        if volume is None:
            known.append(volume := wanted)
        mounts.append((adapter, {"name": volume["name"], **mount}))
    return AdapterVolumes(tuple(known[1:]), tuple(mounts))


def _find_content(volume: Object) -> tuple[str, str]:
    """Return what the volume contains. Two volumes with the same content can be one."""
    if claim := volume.get("persistentVolumeClaim"):
        return "claim", claim["claimName"]
    if image := volume.get("image"):
        return "image", image["reference"]
    return "emptyDir", volume["name"]
