"""`spec.engine`, `spec.resources`, `spec.imagePullSecrets`: what the engine's pods look like."""

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api import names
from conveyor_api.base import ApiModel, KeyedBy, Rule
from conveyor_api.quantities import IntOrString, parse_quantity
from conveyor_api.scheduling import Name

Device = Literal["CUDA", "Auto"]
Dtype = Literal["Auto", "Float32", "BFloat16", "Float16"]

# The engine's settings that no field of the resource governs; the rest of its environment follows the spec.
FREE_ENGINE_SETTINGS: Final = (
    "ATTENTION_BACKEND",
    "LOG_FORMAT",
    "NUM_THREADS",
    "PADDING",
    "PREFIX_CACHING",
    "TASK",
    "WARMUP",
)

_ENV_PATTERN: Final = "^[A-Za-z_][A-Za-z0-9_]*$"
_RESERVED_PATTERN: Final = f"^{names.ENGINE_ENV_PREFIX}({'|'.join(FREE_ENGINE_SETTINGS)})$"
_IMAGE_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
_RESOURCE_NAME_PATTERN: Final = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


class KeySelector(ApiModel):
    """One key of a Secret or ConfigMap in the service's namespace."""

    name: Name
    """Name of the object."""
    key: Name
    """Key of the value."""
    optional: bool | None = None
    """Start without the variable when object or key is missing."""


class FieldSelector(ApiModel):
    """One field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    """For example `status.podIP`."""
    api_version: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Version that the path is written for; default `v1`."""


class EnvVarSource(ApiModel):
    """Where a variable's value comes from."""

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
        "is set by Conveyor from the spec; of the engine's own variables only "
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
    """Where its value comes from."""


class Engine(ApiModel):
    """How the model is run."""

    image: (
        Annotated[
            str,
            Field(min_length=1, max_length=512),
            Rule(
                f"self.matches('{_IMAGE_PATTERN}')",
                "must be an image reference such as registry.example/conveyor/engine:1.0, without spaces",
                lambda image: re.fullmatch(_IMAGE_PATTERN, image) is not None,
            ),
        ]
        | None
    ) = None
    """Engine image; default: the one that the operator was installed with."""
    device: Device = "CUDA"
    """CUDA: a GPU, or the service fails and says so. Auto: a GPU if there is one, else the CPU."""
    dtype: Dtype = "Auto"
    """Number format of weights, activations and KV cache. Auto on a GPU: BFloat16, or Float16 for a model saved in it
    and on GPUs without BFloat16. Auto on a CPU: BFloat16 if it computes in it, else Float32."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Longest request, prompt and output together, in tokens; default: the model's own limit."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Requests that may wait inside one engine, each text to embed one; one more gets 429. The gateways keep this queue
    short."""
    sampling_defaults: Literal["Model", "OpenAI"] = "Model"
    """How a request is sampled that does not say it. Model: temperature, top_p and top_k of the model's
    generation_config.json. OpenAI: temperature 1 and no cut."""
    env: Annotated[list[EnvVar], Field(max_length=64), KeyedBy("name")] = Field(default_factory=list)
    """Further environment variables."""


def _is_amount(value: int | str) -> bool:
    try:
        return parse_quantity(value) >= 0
    except ValueError:
        return False


# Kubernetes counts a value that may be a number or a string as long as a whole request, so the cost of these rules
# is near its limit: hence few resources, and guards only where a wrong value would hide the sentence.
ResourceAmounts = Annotated[
    dict[
        str,
        Annotated[
            int | str,
            IntOrString(),
            Rule(
                "type(self) == int ? self >= 0 : isQuantity(self) && !quantity(self).isLessThan(quantity('0'))",
                "must be a quantity such as 500m, 2 or 10Gi, and not negative",
                _is_amount,
            ),
        ],
    ],
    Field(max_length=6),
    Rule(
        f"self.all(name, name.matches('{_RESOURCE_NAME_PATTERN}'))",
        "must name resources as Kubernetes does, for example cpu, memory or nvidia.com/gpu",
        lambda amounts: all(re.fullmatch(_RESOURCE_NAME_PATTERN, name) for name in amounts),
    ),
    Rule(
        "self.all(name, !name.contains('/') || type(self[name]) == int || string(self[name]).matches('^[0-9]+$'))",
        "must ask for GPUs and other devices in whole numbers, for example nvidia.com/gpu: 1",
        lambda amounts: all("/" not in name or str(amount).isdecimal() for name, amount in amounts.items()),
    ),
]


class Resources(ApiModel):
    """What one engine asks of its node. Ask for the GPU here, for example `limits: {nvidia.com/gpu: 1}`."""

    rules: ClassVar = (
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) ||"
            " !quantity(string(self.requests[name])).isGreaterThan(quantity(string(self.limits[name]))))",
            "requests must not be more than limits",
            lambda resources: all(
                name not in resources.limits or parse_quantity(value) <= parse_quantity(resources.limits[name])
                for name, value in resources.requests.items()
            ),
            field="requests",
        ),
        Rule(
            "!has(self.requests) || self.requests.all(name, !name.contains('/')"
            " || (has(self.limits) && name in self.limits"
            " && string(self.limits[name]) == string(self.requests[name])))",
            "GPUs and other devices go into limits; in requests they may only repeat the same number",
            lambda resources: all(
                "/" not in name or str(resources.limits.get(name)) == str(value)
                for name, value in resources.requests.items()
            ),
            field="requests",
        ),
    )

    requests: ResourceAmounts = Field(default_factory=dict)
    """Amounts that are reserved."""
    limits: ResourceAmounts = Field(default_factory=dict)
    """Amounts that are never exceeded; GPUs are given here."""


class ImagePullSecret(ApiModel):
    """A Secret with the credentials of an image registry."""

    name: Name
    """Name of the Secret."""


ImagePullSecrets = Annotated[list[ImagePullSecret], Field(max_length=16), KeyedBy("name")]
