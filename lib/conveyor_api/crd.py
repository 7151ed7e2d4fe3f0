"""Builds the CustomResourceDefinitions: converts the JSON schemas of pydantic models to structural schemas.

Called by `crds/generate.py` and by tests. Pure. Keywords in `_KEPT` are copied, and those in `_DROPPED` are left out.
The functions `_structural` and `_resolved` convert some others (such as `$ref`, `anyOf` and `const`). Any other keyword
raises UnsupportedSchema, so that no cluster rejects the definitions.
"""

from collections.abc import Mapping
from typing import Any, Final

from conveyor_api import names
from conveyor_api.api_key import APIKey
from conveyor_api.base import ApiModel
from conveyor_api.errors import ConveyorApiError
from conveyor_api.resource import InferenceService
from conveyor_api.served_name import ServedName

Schema = dict[str, Any]

_KEPT: Final = frozenset(
    {
        "type",
        "format",
        "enum",
        "default",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "maxProperties",
        "required",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type",
        "x-kubernetes-validations",
    }
)
_INT32: Final = 2**31 - 1
_DROPPED: Final = frozenset({"title", "$defs"})


class UnsupportedSchema(ConveyorApiError):
    """A model has a constraint that a structural schema cannot express."""


def build_crds() -> list[Schema]:
    """Return every CustomResourceDefinition, ready to apply."""
    return [build_crd(), build_served_name_crd(), build_api_key_crd()]


def build_crd() -> Schema:
    """Return the CustomResourceDefinition for InferenceService."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        _column("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
        _column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
        _column("Model", "string", ".spec.model.uri"),
        _column("Replicas", "integer", ".status.replicas"),
        _column("ReadyReplicas", "integer", ".status.readyReplicas"),
        _column("Desired", "integer", ".status.desiredReplicas"),
        _column("Task", "string", ".status.model.task", priority=1),
        _column("Mode", "string", ".status.effective.mode", priority=1),
        _column("URL", "string", ".status.url", priority=1),
        _AGE,
    ]
    version = _version(build_schema(), columns) | {"subresources": {"status": {}, "scale": scale}}
    plural, short_names = (names.PLURAL, names.SINGULAR), [names.SHORT_NAME]
    return _definition(names.CRD_NAME, names.KIND, plural, version, shortNames=short_names)


def build_served_name_crd() -> Schema:
    """Return the CustomResourceDefinition for ServedName."""
    columns = [_column("ServedName", "string", ".spec.name"), _AGE]
    plural = (names.SERVED_NAME_PLURAL, names.SERVED_NAME_KIND.lower())
    version = _version(build_schema(ServedName), columns)
    return _definition(names.SERVED_NAME_CRD_NAME, names.SERVED_NAME_KIND, plural, version)


def build_api_key_crd() -> Schema:
    """Return the CustomResourceDefinition for APIKey."""
    columns = [
        _column("Owner", "string", ".spec.owner"),
        _column("Services", "string", ".spec.services"),
        _column("Expires", "string", ".spec.expires"),
        _column("LastUsed", "string", ".status.lastUsed"),
        _column("Rejected", "string", ".status.lastRejection.reason", priority=1),
        _AGE,
    ]
    plural = (names.API_KEY_PLURAL, names.API_KEY_KIND.lower())
    version = _version(build_schema(APIKey), columns) | {"subresources": {"status": {}}}
    return _definition(names.API_KEY_CRD_NAME, names.API_KEY_KIND, plural, version)


def _definition(name: str, kind: str, plural: tuple[str, str], version: Schema, **more: Any) -> Schema:
    """Return a CustomResourceDefinition. `plural`: the plural and the singular name."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "labels": {names.PART_OF_LABEL: "conveyor"}},
        "spec": {
            "group": names.GROUP,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural[0], "singular": plural[1], **more},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _version(schema: Schema, columns: list[Schema]) -> Schema:
    return {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": columns,
    }


def _column(name: str, type_: str, json_path: str, priority: int = 0) -> Schema:
    """Return a column of `kubectl get`. A column with priority 1 shows only with `-o wide`."""
    column: Schema = {"name": name, "type": type_, "jsonPath": json_path}
    return column | {"priority": priority} if priority else column


# kstatus, and so each GitOps tool, then treats a service that the operator has not seen as in progress.
_UNSEEN_STATUS: Final = {"observedGeneration": -1}
_AGE: Final = _column("Age", "date", ".metadata.creationTimestamp")


def build_schema(resource: type[ApiModel] = InferenceService) -> Schema:
    """Return the structural schema of a whole resource. The API server defines `metadata`."""
    schema = resource.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    members = {name: member for name, member in schema["properties"].items() if name in ("spec", "status")}
    if resource is InferenceService:
        members["status"] = members["status"] | {"default": _UNSEEN_STATUS}
    rules = schema.get("x-kubernetes-validations")
    return {
        "type": "object",
        "description": _one_line(schema["description"]),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **{name: _structural(member, definitions) for name, member in members.items()},
        },
    } | ({"x-kubernetes-validations": rules} if rules else {})


def _structural(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Return `schema` without references, alternatives and titles, and with Kubernetes' extensions."""
    schema = _resolved(schema, definitions)
    result: Schema = {}
    for keyword, value in schema.items():
        if keyword == "description":
            result[keyword] = _one_line(value)
        elif keyword == "properties":
            result[keyword] = {name: _structural(member, definitions) for name, member in value.items()}
        elif keyword == "items":
            result[keyword] = _structural(value, definitions)
        elif keyword == "const":
            result["enum"] = [value]
        elif keyword == "additionalProperties":
            result |= _map_values(value, definitions)
        elif keyword in _KEPT:
            result[keyword] = value
        elif keyword not in _DROPPED:
            raise UnsupportedSchema(f"no structural schema for {keyword!r} in {schema}")
    return _with_stated_default(_with_format(result))


def _with_format(schema: Schema) -> Schema:
    """Add the width of integers. Generators of Go and Java clients choose types by this width."""
    if schema.get("type") == "integer":
        schema.setdefault("format", "int32" if schema.get("maximum", _INT32 + 1) <= _INT32 else "int64")
    return schema


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Return `schema` merged with the schema that its `$ref` names, or with the type in its `anyOf` that is not null.

    If both have a keyword, such as `description`, the value in `schema` is kept.
    """
    outer = {keyword: value for keyword, value in schema.items() if keyword not in ("$ref", "anyOf")}
    if "$ref" in schema:
        return _resolved(definitions[schema["$ref"].removeprefix("#/$defs/")] | outer, definitions)
    if "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        if len(choices) != 1:
            raise UnsupportedSchema(f"a field has one type, not a choice: {schema}")
        return _resolved(choices[0] | outer, definitions)
    return schema


def _map_values(value: bool | Schema, definitions: Mapping[str, Schema]) -> Schema:
    if value is False:  # unknown fields: pruned, or refused under fieldValidation=Strict
        return {}
    if value is True:
        raise UnsupportedSchema("an untyped map would carry a tenant's JSON of any depth into every process")
    return {"additionalProperties": _structural(value, definitions)}


def _with_stated_default(schema: Schema) -> Schema:
    """Remove null and empty members from the default, and add the default to the description."""
    if "default" in schema:
        schema["default"] = _stated(schema["default"])
        if schema["default"] in (None, {}):
            del schema["default"]
        elif "description" in schema:
            schema["description"] += default_sentence(schema)
    return schema


def default_sentence(schema: Schema) -> str:
    """Return the default as a sentence, because `kubectl explain` does not show defaults.

    The default of an object is stated by its members.
    """
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f" Default: {str(default).lower() if isinstance(default, bool) else default}."


def _stated(value: Any) -> Any:
    """Return `value` without members that are null or empty."""
    if not isinstance(value, dict):
        return value
    members = {name: _stated(member) for name, member in value.items()}
    return {name: member for name, member in members.items() if member not in (None, {}, [])}


def _one_line(text: str) -> str:
    return " ".join(text.split())
