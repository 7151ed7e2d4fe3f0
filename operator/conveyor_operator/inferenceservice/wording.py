"""Rewrites messages with the field names of the spec: an engine's `num_kv_blocks` becomes kvCache.blockBudget. Pure.

Used by `failures` for engines' messages, and by `differences` for the API server's messages. An engine knows only its
own settings, and writes their names in backticks.
"""

import re
from typing import Final, get_args

from conveyor_api import names
from conveyor_api.batching import BatchingMode, KVCacheDtype
from conveyor_api.engine import Device, Dtype, Task
from conveyor_api.env import FREE_ENGINE_SETTINGS
from conveyor_api.model import ImageModel, ModelSource, Quantization
from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.speculation import SpeculationMethod
from conveyor_operator.inferenceservice.manifests.config import RESOURCE_FIELDS

_SETTING = re.compile(r"`([a-z_]{1,40})(?:: ([a-z0-9]{1,40}))?`")
_VALUES: Final = {
    value.lower(): value
    for choice in (Device, Dtype, Quantization, KVCacheDtype, BatchingMode, Task, SpeculationMethod)
    for value in get_args(choice)
}  # the spec's words, by the lower-case words in the configuration file (`manifests.config`)
_VARIABLES: Final = {name.lower(): f"{names.ENGINE_ENV_PREFIX}{name} in pod.env" for name in FREE_ENGINE_SETTINGS}


# Errors about a volume's `image`, from an API server that drops the field and from one that does not know it.
_NO_IMAGE_VOLUMES: Final = ("must specify a volume type", ".image: field not declared in schema")

# An error of containerd 1, which does not support image volumes.
_NO_IMAGE_MOUNTS: Final = 'failed to mkdir ""'


def explain_refusal(message: str, spec: InferenceServiceSpec) -> str:
    """Return `message`, with an explanation if its cause is the address of the model or of an adapter."""
    field = next((field for field, source in _list_sources(spec) if isinstance(source, ImageModel)), "")
    if field and any(said in message for said in _NO_IMAGE_VOLUMES):
        return f"{message}. {field}: oci:// needs image volumes, which this cluster lacks (Kubernetes 1.35 has them)"
    return message


def _list_sources(spec: InferenceServiceSpec) -> list[tuple[str, ModelSource]]:
    return [("model.uri", spec.model.source), *(("adapters", adapter.source) for adapter in spec.adapters)]


def explain_start(said: str, model_image: str, has_other_images: bool = False) -> str:
    """Return why a container cannot start: `said`, or an explanation if the runtime does not support image volumes.

    has_other_images: whether adapters are in images.
    """
    if (model_image or has_other_images) and _NO_IMAGE_MOUNTS in said:
        field = "model.uri" if model_image else "adapters"
        return f"{field}: oci:// needs image volumes, which the node's runtime lacks (containerd 2.1 has them)"
    return said


def to_field_names(message: str) -> str:
    """Return `message` with the engine's settings replaced by fields of the spec."""
    return _SETTING.sub(_field, message)


def _field(match: re.Match[str]) -> str:
    setting, value = match.groups()
    field = RESOURCE_FIELDS.get(setting) or _VARIABLES.get(setting)
    if field is None:
        return match[0]
    return field if value is None else f"{field}: {_VALUES.get(value, value)}"
