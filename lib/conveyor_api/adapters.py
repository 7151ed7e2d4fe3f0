"""`spec.adapters`: LoRA adapters that the engines serve beside the model itself.

The rules that compare adapters with other fields of the spec are `ADAPTER_RULES`, which `spec` includes.
"""

import re
from typing import Annotated, ClassVar, Final

from pydantic import Field

from conveyor_api import names
from conveyor_api.base import ApiModel, KeyedBy, Rule
from conveyor_api.model import SECRET_RULES, ModelSource, ModelUri, Mounted, SecretRef, VolumeModel, parse_model_uri
from conveyor_api.pod import Pod

MAX_ADAPTERS: Final = 1000
ADAPTER_SLOTS: Final = 16  # adapters that an engine has on its device, unless its setting differs
MAX_OF_PODS: Final = 16  # adapters for which pods have a container or a volume
# Between a model's name and an adapter's name in a request's `model`. Adapters' names do not contain it.
SEPARATOR: Final = ":"
_NAME_PATTERN: Final = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
# Names of volumes, and paths, that pods with adapters use.
_TAKEN_VOLUME: Final = f"^({names.ADAPTERS_VOLUME}|{names.ADAPTER_VOLUME}-(list|[0-9]+))$"
_TAKEN_PATH: Final = f"^{names.ADAPTERS_PATH}(/|$)"


class Adapter(ApiModel):
    """A LoRA adapter for the model, in PEFT's format."""

    rules: ClassVar = SECRET_RULES

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        Rule(
            f"self.matches('{_NAME_PATTERN}')",
            "must start and end with a letter or digit; between them also . _ - are allowed",
            lambda name: re.fullmatch(_NAME_PATTERN, name) is not None,
        ),
    ]
    """Name of the adapter. Clients set `model` to the model's name, a colon and this name, for example `qwen:sql`."""
    uri: ModelUri
    """Source of `adapter_config.json` and `adapter_model.safetensors`, in the forms of `model.uri`."""
    secret_ref: SecretRef | None = None
    """Credentials for the adapter, as in `model.secretRef`, which is for the model only."""

    @property
    def source(self) -> ModelSource:
        """Return the parsed uri."""
        return parse_model_uri(self.uri)

    @property
    def needs_pod(self) -> bool:
        """Whether pods have a container or a volume for this adapter alone."""
        return self.secret_ref is not None or self.uri.startswith("oci://")

    @property
    def mount_path(self) -> str:
        """Return where the pods mount the claim or the image that contains the adapter."""
        source = self.source
        if isinstance(source, VolumeModel):  # a further adapter in the same claim needs no other mount
            return f"{names.ADAPTERS_PATH}/claims/{source.claim_name}"
        return f"{names.ADAPTERS_PATH}/images/{self.name}"

    @property
    def directory(self) -> str:
        """Return the adapter's folder in the engine's pod.

        A download has another folder than a model with the same uri, because other files of it are fetched.
        """
        source = self.source
        if isinstance(source, Mounted):
            return f"{self.mount_path}/{source.path}".rstrip("/")
        return source.directory.replace(names.MODELS_PATH, names.FETCHED_ADAPTERS_PATH, 1)


Adapters = Annotated[list[Adapter], Field(max_length=MAX_ADAPTERS), KeyedBy("name")]


def _leaves_names_free(pod: Pod) -> bool:
    taken = (
        *(re.search(_TAKEN_VOLUME, volume.name) for volume in pod.volumes),
        *(re.search(_TAKEN_PATH, mount.mount_path) for mount in pod.volume_mounts),
    )
    return not any(taken)


_HAS_NONE: Final = "!has(self.adapters) || size(self.adapters) == 0"
ADAPTER_RULES: Final = (
    Rule(
        f"{_HAS_NONE} || self.runtime == 'VLLM' || has(self.task) && self.task != 'Generate'"
        " || (has(self.engine) && has(self.engine.tensorParallelSize) ? self.engine.tensorParallelSize == 1"
        f" : !has(self.resources) || !has(self.resources.limits) || !('{names.GPU}' in self.resources.limits)"
        f" || string(self.resources.limits['{names.GPU}']).matches('^0*[01]$'))",
        "an engine with adapters cannot divide its model among several GPUs; request 1 GPU, set "
        "engine.tensorParallelSize: 1, or remove adapters",
        lambda spec: (
            not spec.adapters
            or spec.runtime == "VLLM"
            or spec.task not in (None, "Generate")
            or spec.tensor_parallel_size == 1
        ),
        field="adapters",
    ),
    Rule(
        f"{_HAS_NONE} || size(self.adapters.filter(each, has(each.secretRef) || each.uri.startsWith('oci://')))"
        f" <= {MAX_OF_PODS}",
        f"at most {MAX_OF_PODS} adapters may have a secretRef or be in an image, because each needs an init container "
        "or a volume of the pod; put the others in a volume (pvc://)",
        lambda spec: sum(each.needs_pod for each in spec.adapters) <= MAX_OF_PODS,
        field="adapters",
    ),
    Rule(
        f"{_HAS_NONE} || !has(self.pod)"
        f" || (!has(self.pod.volumes) || !self.pod.volumes.exists(volume, volume.name.matches('{_TAKEN_VOLUME}')))"
        " && (!has(self.pod.volumeMounts)"
        f" || !self.pod.volumeMounts.exists(mount, mount.mountPath.matches('{_TAKEN_PATH}')))",
        f"the volumes {names.ADAPTERS_VOLUME} and {names.ADAPTER_VOLUME}-NUMBER, and paths in {names.ADAPTERS_PATH}, "
        "are Conveyor's own if there are adapters; choose other names in pod.volumes and pod.volumeMounts",
        lambda spec: not spec.adapters or _leaves_names_free(spec.pod),
        field="pod",
    ),
)
