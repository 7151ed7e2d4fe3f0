"""Others' sentences in the words of the resource: an engine's `num_kv_blocks` becomes kvCache.blockBudget. Pure.

Used by `failures`, and by `plan` for what the API server says. An engine knows its own settings only, and writes their
names in backticks.
"""

import re
from typing import Final, get_args

from conveyor_api import names
from conveyor_api.batching import BatchingMode, KVCacheDtype
from conveyor_api.engine import Device, Dtype, Task
from conveyor_api.env import FREE_ENGINE_SETTINGS
from conveyor_api.model import ImageModel, ModelSource
from conveyor_operator.inferenceservice.manifests.config import RESOURCE_FIELDS

_SETTING = re.compile(r"`([a-z_]{1,40})(?:: ([a-z0-9]{1,40}))?`")
_VALUES: Final = {
    value.lower(): value for choice in (Device, Dtype, KVCacheDtype, BatchingMode, Task) for value in get_args(choice)
}  # `manifests.config` writes them so
_VARIABLES: Final = {name.lower(): f"{names.ENGINE_ENV_PREFIX}{name} in pod.env" for name in FREE_ENGINE_SETTINGS}


# Of a volume's `image`, by an API server that drops the field and by one that does not know it.
_NO_IMAGE_VOLUMES: Final = ("must specify a volume type", ".image: field not declared in schema")

# By containerd 1, of a mount whose image it does not know to be one.
_NO_IMAGE_MOUNTS: Final = 'failed to mkdir ""'


def explain_refusal(message: str, source: ModelSource) -> str:
    """`message`, and what it comes from where that is the model's address."""
    if isinstance(source, ImageModel) and any(said in message for said in _NO_IMAGE_VOLUMES):
        return (
            f"{message}. model.uri: oci:// needs image volumes, which this cluster does not have (Kubernetes 1.35 has)"
        )
    return message


def explain_start(said: str, model_image: str) -> str:
    """Why a container cannot start: `said`, unless that comes from a runtime without image volumes."""
    if model_image and _NO_IMAGE_MOUNTS in said:
        return "model.uri: oci:// needs image volumes, which the node's runtime does not have (containerd 2.1 has)"
    return said


def to_field_names(message: str) -> str:
    """`message` with the fields of the spec in place of the engine's settings."""
    return _SETTING.sub(_field, message)


def _field(match: re.Match[str]) -> str:
    setting, value = match.groups()
    field = RESOURCE_FIELDS.get(setting) or _VARIABLES.get(setting)
    if field is None:
        return match[0]
    return field if value is None else f"{field}: {_VALUES.get(value, value)}"
