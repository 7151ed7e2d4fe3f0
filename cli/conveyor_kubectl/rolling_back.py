"""`kubectl conveyor rollback-check`: finds what the CRDs of an older release would drop or refuse. For `command`.

The API server drops fields that a CRD does not have, silently and for good. An older operator reports a service with a
value that it does not know as `InvalidSpec`. Nothing is written to the cluster.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from conveyor_api import names
from conveyor_insight.facts import Object, Unanswered
from conveyor_kubectl.cluster import Cluster
from conveyor_operator.kinds import ObjectKind

DESCRIPTION = """Show which fields of InferenceServices a rollback would drop, because the CRDs of the older release do
not have them, and which values they do not allow, so that the service becomes InvalidSpec. Pipe the older release's
manifests into the command: helm get manifest conveyor -n conveyor-system --revision N. Fields that are dropped with the
default value of the present CRDs do not count. The exit code is 1 if something is found."""

CRD: Final = ObjectKind(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
_EMPTY: Final[Object] = {}
_KEEPS_ALL: Final[Object] = {"x-kubernetes-preserve-unknown-fields": True}


def find_lost(cluster: Cluster, file: str) -> list[str]:
    """Return a line for each field that would be dropped, and each value that is not allowed.

    Raises Unanswered, also if the manifests have no CRDs.
    file: path of the older release's manifests; "-" for the standard input.
    """
    older = _read_crds(file)
    if not older:
        raise Unanswered(f"the manifests have no CRD of {names.GROUP}; use the files in crds/ of that release")
    return [line for crd in older for line in _find_lines(cluster, crd)]


def _read_crds(file: str) -> list[Object]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        found = [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]
        return [each for each in found if each.get("kind") == CRD.kind and each["spec"]["group"] == names.GROUP]
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise Unanswered(f"cannot read the manifests: {' '.join(str(error).split())}") from error


def _find_lines(cluster: Cluster, older: Object) -> Iterator[str]:
    kept, present = _find_spec(older), cluster.find(CRD.path(None, older["metadata"]["name"]))
    if present is None:
        return
    defaults = _find_spec(present)
    version, plural = present["spec"]["versions"][0]["name"], present["spec"]["names"]["plural"]
    for body in cluster.get(f"/apis/{names.GROUP}/{version}/{plural}")["items"]:
        metadata = body["metadata"]
        for path in _find_unknown(body.get("spec", {}), kept, defaults, "spec"):
            yield f"{body.get('kind', plural)} {metadata['namespace']}/{metadata['name']}: {path}"


def _find_spec(crd: Object) -> Object:
    """Return the schema of `spec` in the stored version."""
    stored = next(version for version in crd["spec"]["versions"] if version["storage"])
    found: Object = stored["schema"]["openAPIV3Schema"]["properties"].get("spec", _EMPTY)
    return found


def _find_unknown(value: Any, kept: Object, defaults: Object, path: str) -> Iterator[str]:
    """Yield the paths of fields of `value` that the schema `kept` drops, and of values that its `enum` lacks.

    Dropped fields with their default are left out.
    """
    if "enum" in kept and value not in kept["enum"]:
        yield f"{path}: {value} is not allowed"
    if isinstance(value, list) and not kept.get("x-kubernetes-preserve-unknown-fields"):
        for number, item in enumerate(value):
            yield from _find_unknown(
                item, kept.get("items", _EMPTY), defaults.get("items", _EMPTY), f"{path}[{number}]"
            )
    if not isinstance(value, dict) or kept.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, member in value.items():
        present = _find_member(defaults, name) or _EMPTY
        known = _find_member(kept, name)
        if known is not None:
            yield from _find_unknown(member, known, present, f"{path}.{name}")
        elif not _is_default(member, present):
            yield f"{path}.{name}"


def _find_member(schema: Object, name: str) -> Object | None:
    """Return the schema of a member; None if the API server drops it."""
    additional = schema.get("additionalProperties")
    member = (schema.get("properties") or {}).get(name, additional)
    return _KEEPS_ALL if member is True else member


def _is_default(value: Any, schema: Object) -> bool:
    if "default" in schema and value == schema["default"]:
        return True
    members = schema.get("properties") or {}
    return isinstance(value, dict) and all(_is_default(each, members.get(name, {})) for name, each in value.items())
