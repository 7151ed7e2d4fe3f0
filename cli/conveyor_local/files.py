"""Reads the objects in files, folders and standard input, and checks those of Conveyor. Used by `command`."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import yaml

from conveyor_api import names
from conveyor_api.api_key import APIKey
from conveyor_api.errors import InvalidResource
from conveyor_local.errors import RunError
from conveyor_local.refusals import describe_refusal

Object = dict[str, Any]

_JOBS_PROGRAM: Final = "conveyor_jobs"
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_LABEL: Final = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_KEY: Final = re.compile(rf"{_LABEL}/{_LABEL}([.]{_LABEL})*")
DEFAULT_NAMESPACE: Final = "default"


@dataclass(slots=True)
class Objects:
    """The objects of all files, by `namespace/name`. `skipped`: objects that have no use here, in words."""

    services: dict[str, Object] = field(default_factory=dict)
    jobs: dict[str, Object] = field(default_factory=dict)
    keys: dict[str, Object] = field(default_factory=dict)
    secrets: dict[str, Object] = field(default_factory=dict)
    config_maps: dict[str, Object] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def add(self, where: str, body: Object, namespace: str) -> None:
        """Add an object, with `namespace` if it names none. Raises RunError."""
        metadata = body.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        kind, version = str(body.get("kind")), str(body.get("apiVersion"))
        if not isinstance(metadata, dict) or not isinstance(name, str):
            raise RunError(f"{where}: an object without metadata.name ({kind} of {version})")
        body = {**body, "metadata": {"namespace": namespace, **metadata}}
        key = f"{body['metadata']['namespace']}/{name}"
        if not _KEY.fullmatch(key):
            raise RunError(f"{where}: {key!r} must be a namespace and a name of lowercase letters, digits, '-' and '.'")
        known = self._choose(kind, version, body)
        if known is None:
            self.skipped.append(f"{kind} {key}")
        elif key in known:
            raise RunError(f"{where}: there are two objects {kind} {key}")
        else:
            known[key] = body
        if known is self.services and (refusal := describe_refusal(body)):
            raise RunError(f"{where}: {refusal}")
        if known is self.keys:
            try:
                APIKey.parse(body)
            except InvalidResource as error:
                raise RunError(f"{where}: {names.API_KEY_KIND} {key}: {error}") from error

    def _choose(self, kind: str, version: str, body: Object) -> dict[str, Object] | None:
        match kind, version:
            case names.KIND, names.API_VERSION:
                return self.services
            case names.API_KEY_KIND, names.API_VERSION:
                return self.keys
            case "Job", "batch/v1":
                return self.jobs if _JOBS_PROGRAM in _find_command(body) else None
            case "Secret", "v1":
                return self.secrets
            case "ConfigMap", "v1":
                return self.config_maps
        return None


class _Loader(yaml.SafeLoader):
    """Reads YAML as kubectl does: a date is a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        letter: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _find_command(job: Mapping[str, Any]) -> list[str]:
    try:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        return [str(part) for part in container["command"]]
    except (LookupError, TypeError, ValueError):
        return []


def read_objects(paths: Iterable[str], namespace: str = "", stdin: TextIO | None = None) -> Objects:
    """Read files, folders and `-` for standard input. Raises RunError for the first problem."""
    objects = Objects()
    for where, text in _read_texts(paths, stdin or sys.stdin):
        for body in _parse(where, text):
            objects.add(where, body, namespace or DEFAULT_NAMESPACE)
    if not objects.services:
        others = f"; {', '.join(objects.skipped)} have no use here" if objects.skipped else ""
        raise RunError(f"there is no InferenceService in {', '.join(paths)}{others}")
    return objects


def _read_texts(paths: Iterable[str], stdin: TextIO) -> Iterator[tuple[str, str]]:
    for each in paths:
        if each == "-":
            yield "standard input", stdin.read()
            continue
        path = Path(each)
        found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES) if path.is_dir() else [path]
        if not found:
            raise RunError(f"{each}: the folder has no file that ends in {', '.join(_SUFFIXES)}")
        for file in found:
            try:
                yield str(file), file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise RunError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def _parse(where: str, text: str) -> Iterator[Object]:
    try:
        documents = list(yaml.load_all(text, _Loader))
        json.dumps(documents)
    except yaml.YAMLError as error:
        raise RunError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"{where} has a value that JSON cannot express: {error}") from error
    for document in documents:
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else [document]
        for body in items or ():
            if isinstance(body, dict):
                yield body
            elif body is not None:
                raise RunError(f"{where}: a document must be an object, not {str(body)[:80]!r}")
