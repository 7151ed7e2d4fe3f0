"""Builds the list of a service's LoRA adapters, which engines follow, and chooses the volumes for adapters. Pure.

The list is in a ConfigMap, which the kubelet updates in running pods. So a change of the list replaces no pod, unless
the pods need another volume or another Secret for it. An adapter in a claim or an image is mounted read-only. A
downloaded adapter is in the model's volume, with the model's cache. If the model itself is mounted, an emptyDir
contains the downloaded adapters. Engines download adapters themselves, except those with a Secret: an init container
does this, so that no engine gets the credentials.

A pod has one volume for each claim and each image, even if several adapters or the model use it. Adapters are sorted by
name, so that their order in the spec does not matter.
"""

from dataclasses import dataclass

import yaml

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
from conveyor_operator.loop.owner import Object, Owner, build_metadata


@dataclass(frozen=True, slots=True)
class AdapterVolumes:
    """What pods with adapters have in addition."""

    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    """Of the engine's container."""
    fetches: tuple[tuple[Adapter, Object], ...] = ()
    """The adapters for which an init container is needed, each with the mount of its volume."""


def _sort(spec: InferenceServiceSpec) -> list[Adapter]:
    return sorted(spec.adapters, key=lambda adapter: adapter.name)


def plan_adapter_volumes(owner: Owner, spec: InferenceServiceSpec) -> AdapterVolumes:
    if not spec.adapters:
        return AdapterVolumes()
    adapters, model = _sort(spec), build_model_volume(owner, spec)
    known, mounts, fetch_mount = [model], list[Object](), build_model_mount(spec)
    downloads = {"name": names.MODEL_VOLUME, "subPath": names.FETCHED_ADAPTERS_PATH.rpartition("/")[2]}
    if isinstance(spec.model.source, Mounted):
        known.append(build_download_volume(names.ADAPTERS_VOLUME, spec.model.cache))
        downloads = {"name": names.ADAPTERS_VOLUME}
        fetch_mount = {**downloads, "mountPath": names.FETCHED_ADAPTERS_PATH}
    mounts.append({**downloads, "mountPath": names.FETCHED_ADAPTERS_PATH})
    mounted = {each.mount_path: each.source for each in adapters if isinstance(each.source, Mounted)}
    for path in sorted(mounted):  # a further adapter in one of them changes nothing
        wanted = build_mounted_volume(f"{names.ADAPTER_VOLUME}-{len(known)}", mounted[path])
        volume = next((each for each in known if _find_content(each) == _find_content(wanted)), None)
        if volume is None:
            known.append(volume := wanted)
        mounts.append({"name": volume["name"], "mountPath": path, "readOnly": True})
    known.append({"name": names.ADAPTER_LIST_VOLUME, "configMap": {"name": names.adapter_list_name(owner.name)}})
    mounts.append(
        {
            "name": names.ADAPTER_LIST_VOLUME,
            "mountPath": names.ADAPTER_LIST_PATH.rpartition("/")[0],
            "readOnly": True,
        }
    )
    fetches = tuple((adapter, fetch_mount) for adapter in adapters if adapter.secret_ref is not None)
    return AdapterVolumes(tuple(known[1:]), tuple(mounts), fetches)


def build_adapter_list(owner: Owner, spec: InferenceServiceSpec) -> Object:
    """Return the ConfigMap with the list. An adapter without a uri is in its directory when the engine starts."""
    content = {adapter.name: _list(adapter) for adapter in _sort(spec)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(owner, names.adapter_list_name(owner.name)),
        "data": {names.ADAPTER_LIST_KEY: yaml.safe_dump(content)},
    }


def _list(adapter: Adapter) -> Object:
    return {"directory": adapter.directory} | ({} if adapter.secret_ref else {"uri": adapter.uri})


def _find_content(volume: Object) -> tuple[str, str]:
    """Return what the volume contains. Two volumes with the same content can be one."""
    if claim := volume.get("persistentVolumeClaim"):
        return "claim", claim["claimName"]
    if image := volume.get("image"):
        return "image", image["reference"]
    return "emptyDir", volume["name"]
