"""Turns a pod template of the operator into programs that run on this machine. Used by `pod`, `plans` and `offline`.

Volumes become folders, and a path below a mount point becomes a path in the volume's folder. Environment variables are
read from the objects in the files, as the kubelet does.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conveyor_api import names
from conveyor_local.errors import RunError
from conveyor_local.files import Objects
from conveyor_local.places import Places

Object = Mapping[str, Any]

# Variables of containers that have no meaning here, or another one.
_NOT_HERE: Final = frozenset(("HOME", names.TERMINATION_LOG_ENV))
_HOME: Final = "/tmp"
_KEY: Final = re.compile("[-._a-zA-Z0-9]{1,253}")  # of a ConfigMap or a Secret, as the API server allows it
# Settings of the engine in the user's environment would win over the configuration file.
_NOT_INHERITED: Final = names.ENGINE_ENV_PREFIX


class Missing(Exception):
    """An object that a container needs does not exist: the kubelet's words."""


@dataclass(frozen=True, slots=True)
class PodFields:
    """The fields of a pod that a variable can have."""

    namespace: str
    name: str
    uid: str
    service_account: str = ""

    def find(self, path: str) -> str:
        """Return the field at a path such as `status.podIP`; "" for one that has no meaning here."""
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.serviceAccountName": self.service_account,
            "spec.nodeName": "localhost",
        }
        return fields.get(path, "127.0.0.1" if path.startswith("status.") else "")


class Folders:
    """The folders of the mount points of one container."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = dict(sorted(folders.items(), key=lambda each: -len(each[0])))

    def translate(self, text: str) -> str:
        """Return the text with the folder in place of a mount point at its start, or behind `=` or `:`."""
        for mount, folder in self._folders.items():
            text = re.sub(rf"(^|[=:]){re.escape(mount)}(?=/|:|$)", rf"\g<1>{_escape(folder)}", text)
        return text


def _escape(folder: Path) -> str:
    return str(folder).replace("\\", r"\\")


def find_folders(template: Object, container: Object, find: Callable[[Object], Path]) -> Folders:
    """Return the folders of the container's mounts. find: returns the folder of a volume, or raises RunError."""
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes") or ()}
    mounts = container.get("volumeMounts") or ()
    return Folders(
        {
            mount["mountPath"]: find(volumes[mount["name"]]) / mount.get("subPath", "")
            for mount in mounts
            if mount["name"] in volumes and not _is_scratch(volumes[mount["name"]])
        }
    )


def _is_scratch(volume: Object) -> bool:
    return volume["name"] in names.REPLACEABLE_VOLUMES


def find_volume(volume: Object, namespace: str, owner: str, places: Places, objects: Objects) -> Path:
    """Return the folder of a volume; write the files of a ConfigMap or a Secret into it. Raises RunError.

    owner: a path that only the pods of one service or job have. Each mount of a Secret has a folder of its own, because
    `items` give different keys the same path. The folder has the Secret's name, which `conveyor_engine.fetching` reads.
    """
    own: Path = places.state / namespace
    if claim := volume.get("persistentVolumeClaim"):
        return places.find_volume(claim["claimName"])
    if image := volume.get("image"):
        cause = f"oci://{image['reference']} is an image, which only a cluster mounts"
        raise RunError(f"{cause}; unpack it into a folder, and name it with pvc:// and --volume")
    if source := volume.get("configMap"):
        return _write_files(own / "config-maps" / source["name"], _read_config_map(objects, namespace, source["name"]))
    if source := volume.get("secret"):
        secret = source["secretName"]
        return _write_files(
            own / "secrets" / owner / volume["name"] / secret, _select_files(source, namespace, objects)
        )
    folder: Path = own / "volumes" / volume["name"]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _select_files(source: Object, namespace: str, objects: Objects) -> dict[str, bytes]:
    """Return the files of a Secret's volume: all keys, or the keys of `items` under their paths. Raises Missing."""
    try:
        files = _read_secret(objects, namespace, source["secretName"])
    except Missing:
        if source.get("optional"):
            return {}
        raise
    if "items" not in source:
        return files
    return {item["path"]: files[item["key"]] for item in source["items"] if item["key"] in files}


def _write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files, and remove those of keys that are gone. Keeps folders, such as Python's `__pycache__`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in folder.iterdir():
        if path.name not in files and path.is_file():
            path.unlink()
    for name, content in files.items():
        if not _KEY.fullmatch(name) or name.startswith(".."):
            raise RunError(f"{name!r} must be letters, digits, '-', '_' and '.', and must not begin with '..'")
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(content)
    return folder


def _read_config_map(objects: Objects, namespace: str, name: str) -> dict[str, bytes]:
    body = objects.config_maps.get(f"{namespace}/{name}")
    if body is None:
        raise Missing(f'configmap "{name}" not found')
    texts = {key: str(text).encode() for key, text in (body.get("data") or {}).items()}
    return texts | {key: _decode(name, text) for key, text in (body.get("binaryData") or {}).items()}


def _read_secret(objects: Objects, namespace: str, name: str) -> dict[str, bytes]:
    body = objects.secrets.get(f"{namespace}/{name}")
    if body is None:
        raise Missing(f'secret "{name}" not found')
    encoded = {key: _decode(name, text) for key, text in (body.get("data") or {}).items()}
    return encoded | {key: str(text).encode() for key, text in (body.get("stringData") or {}).items()}


def _decode(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise RunError(f"{name}: data must be base64; use stringData for plain text") from error


def build_environment(
    container: Object, pod: PodFields, folders: Folders, objects: Objects, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the container's variables beside those of this process. Raises Missing."""
    result = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    given = {each["name"]: each for each in container.get("env") or ()}
    for name, variable in given.items():
        if name in _NOT_HERE and variable.get("value") in (_HOME, names.TERMINATION_LOG_PATH):
            continue
        value = _find_value(variable, pod, objects)
        if value is not None:
            result[name] = folders.translate(value)
    return result


def _find_value(variable: Object, pod: PodFields, objects: Objects) -> str | None:
    if "valueFrom" not in variable:
        return str(variable.get("value", ""))
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return pod.find(source["fieldRef"]["fieldPath"])
    if "secretKeyRef" in source:
        return _find_key(source["secretKeyRef"], _read_secret, "Secret", pod.namespace, objects)
    return _find_key(source["configMapKeyRef"], _read_config_map, "ConfigMap", pod.namespace, objects)


def _find_key(
    selector: Object,
    read: Callable[[Objects, str, str], dict[str, bytes]],
    kind: str,
    namespace: str,
    objects: Objects,
) -> str | None:
    name, key = selector["name"], selector["key"]
    try:
        values = read(objects, namespace, name)
        if key not in values:
            raise Missing(f"couldn't find key {key} in {kind} {namespace}/{name}")
        return values[key].decode()
    except Missing:
        if selector.get("optional"):
            return None
        raise


def list_arguments(container: Object, folders: Folders) -> Iterator[str]:
    """Yield the arguments behind `python -m MODULE`, with the folders of this machine."""
    for argument in (*container["command"][3:], *(container.get("args") or ())):
        yield folders.translate(str(argument))
