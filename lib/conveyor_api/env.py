"""`spec.pod.env`: variables of the engine and of the model download."""

import re
from typing import Annotated, ClassVar, Final

from pydantic import Field

from conveyor_api import names
from conveyor_api.base import ApiModel, KeyedBy, Rule
from conveyor_api.scheduling import Name

# Engine settings that `env` may set, because no field of the resource controls them. The spec
# determines all other engine settings.
FREE_ENGINE_SETTINGS: Final = (
    "ADAPTER_SLOTS",
    "ATTENTION_BACKEND",
    "ENFORCE_EAGER",
    "LOG_FORMAT",
    "NUM_THREADS",
    "PADDING",
    "PREFIX_CACHING",
    "WARMUP",
)

_ENV_PATTERN: Final = "^[A-Za-z_][A-Za-z0-9_]*$"
_RESERVED_PATTERN: Final = f"^{names.ENGINE_ENV_PREFIX}({'|'.join(FREE_ENGINE_SETTINGS)})$"


class KeySelector(ApiModel):
    """One key of a Secret or ConfigMap in the service's namespace."""

    name: Name
    """Name of the object."""
    key: Name
    """Key of the value."""
    optional: bool | None = None
    """Start without the variable if the object or the key is missing."""


class FieldSelector(ApiModel):
    """One field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    """Path of the field, for example `status.podIP`."""
    api_version: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Version that the path is written for; default `v1`."""


class EnvVarSource(ApiModel):
    """The source of a variable's value."""

    rules: ClassVar = (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(given, given)",
            "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            lambda source: [source.secret_key_ref, source.config_map_key_ref, source.field_ref].count(None) == 2,
        ),
    )

    secret_key_ref: KeySelector | None = None
    """A key of a Secret."""
    config_map_key_ref: KeySelector | None = None
    """A key of a ConfigMap."""
    field_ref: FieldSelector | None = None
    """A field of the pod."""


EnvName = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Rule(
        f"self.matches('{_ENV_PATTERN}')",
        "must be the name of an environment variable: letters, digits and _, not starting with a digit",
        lambda name: re.fullmatch(_ENV_PATTERN, name) is not None,
    ),
    Rule(
        f"self != '{names.TERMINATION_LOG_ENV}'"
        f" && (!self.startsWith('{names.ENGINE_ENV_PREFIX}') || self.matches('{_RESERVED_PATTERN}'))",
        "must not be a variable that Conveyor sets from the spec; of the engine's own variables only "
        + ", ".join(names.ENGINE_ENV_PREFIX + setting for setting in FREE_ENGINE_SETTINGS)
        + " may be set here",
        lambda name: (
            name != names.TERMINATION_LOG_ENV
            and (not name.startswith(names.ENGINE_ENV_PREFIX) or re.fullmatch(_RESERVED_PATTERN, name) is not None)
        ),
    ),
]


class EnvVar(ApiModel):
    """One environment variable of the engine and of the model download."""

    rules: ClassVar = (
        Rule(
            "has(self.value) != has(self.valueFrom)",
            "a variable needs exactly one of value and valueFrom",
            lambda variable: (variable.value is None) != (variable.value_from is None),
        ),
    )

    name: EnvName
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value."""
    value_from: EnvVarSource | None = None
    """Source of the value."""


Env = Annotated[list[EnvVar], Field(max_length=64), KeyedBy("name")]
