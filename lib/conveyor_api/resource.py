"""The InferenceService, and the only way to read it: `InferenceService.parse`.

Called by the operator and the gateway with bodies from the API server. Pure.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from conveyor_api import names
from conveyor_api.base import ApiModel, Rule
from conveyor_api.batching import Batching
from conveyor_api.errors import InvalidResource
from conveyor_api.spec import NO_SURGE, InferenceServiceSpec
from conveyor_api.status import InferenceServiceStatus
from conveyor_api.workload import P95_SUM_CEL

# The model's own limit is known once a pod has read its config.json. The API server rejects an edit that exceeds this
# limit, because the edit would replace running pods by pods that cannot start.
_UNKNOWN_LIMIT = (
    "!has(oldSelf.status) || !has(oldSelf.status.model) || !has(oldSelf.status.model.contextLength)"
    " || !has(oldSelf.status.model.uri) || oldSelf.status.model.uri != self.spec.model.uri"
)

# A claim's access mode never changes. If only one node at a time may mount the claim, a second pod might never start.
_ONE_NODE = (
    "has(oldSelf.status) && has(oldSelf.status.effective) && has(oldSelf.status.effective.cacheAccessMode)"
    " && oldSelf.status.effective.cacheAccessMode == 'ReadWriteOnce'"
    " && self.spec.model.cache.strategy == 'PVC' && has(self.spec.model.cache.size)"
)


def _one_pod(spec: str) -> str:
    """Return a CEL expression that is true if there is at most one pod at a time."""
    most = f"(has({spec}.autoscaling) ? {spec}.autoscaling.maxReplicas : has({spec}.replicas) ? {spec}.replicas : 1)"
    return f"({most} <= 1 && (!has({spec}.rollout) || {NO_SURGE.format(rollout=f'{spec}.rollout')}))"


class Metadata(ApiModel):
    """The members of `metadata` that Conveyor reads."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str | None = None


class InferenceService(ApiModel):
    """One model, served in batches: engines in pods, a queue in front, replicas that follow the queue."""

    rules: ClassVar = (
        Rule(
            f"self.metadata.name.size() <= {names.MAX_SERVICE_NAME_LENGTH}",
            f"metadata.name must have at most {names.MAX_SERVICE_NAME_LENGTH} characters: "
            "the names of pods and other children are built from it",
            lambda service: len(service.name) <= names.MAX_SERVICE_NAME_LENGTH,
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]')",
            "metadata.name must start with a letter: a Service has the same name",
            lambda service: re.match("[a-z]", service.name) is not None,
        ),
        Rule(
            "!self.metadata.name.contains('.')",
            "metadata.name must not contain dots: a Service has the same name; write qwen2-5, not qwen2.5",
            lambda service: "." not in service.name,
        ),
        Rule(
            f"!self.metadata.name.endsWith('{names.ENGINE_SUFFIX}')",
            f"metadata.name must not end in {names.ENGINE_SUFFIX}: the children of another service have such names",
            lambda service: not service.name.endswith(names.ENGINE_SUFFIX),
        ),
        Rule(
            f"{_UNKNOWN_LIMIT} || !has(self.spec.engine.maxModelLen)"
            " || self.spec.engine.maxModelLen <= oldSelf.status.model.contextLength"
            " || (has(oldSelf.spec.engine.maxModelLen)"
            " && self.spec.engine.maxModelLen == oldSelf.spec.engine.maxModelLen)",
            "spec.engine.maxModelLen exceeds the context length of the model, status.model.contextLength; "
            "set at most that",
        ),
        Rule(
            f"{_UNKNOWN_LIMIT} || has(self.spec.engine.maxModelLen) || has(self.spec.workload)"
            " || !has(self.spec.kvCache.blockBudget)"
            " || self.spec.kvCache.blockBudget * self.spec.kvCache.blockSize >= oldSelf.status.model.contextLength"
            " || (self.spec.kvCache == oldSelf.spec.kvCache && !has(oldSelf.spec.engine.maxModelLen)"
            " && !has(oldSelf.spec.workload))",
            "spec.kvCache.blockBudget x blockSize is less than the context length of the model, "
            "status.model.contextLength; raise blockBudget, or lower spec.engine.maxModelLen to what fits",
        ),
        Rule(
            f"{_UNKNOWN_LIMIT} || !has(self.spec.workload)"
            f" || {P95_SUM_CEL.format(at='.spec')} <= oldSelf.status.model.contextLength"
            " || (has(oldSelf.spec.workload) && self.spec.workload == oldSelf.spec.workload)",
            "inputTokens.p95 + outputTokens.p95 of spec.workload exceed the context length of the model, "
            "status.model.contextLength; lower them",
        ),
        Rule(
            f"!({_ONE_NODE}) || {_one_pod('self.spec')} || !{_one_pod('oldSelf.spec')}",
            "the claim of spec.model.cache was made for one pod (ReadWriteOnce), so a second one might never start; "
            "keep one replica without maxSurge, or name a ReadWriteMany claim in spec.model.cache.claimName",
        ),
    )

    api_version: Literal["conveyor.dev/v1alpha1"] = names.API_VERSION
    kind: Literal["InferenceService"] = names.KIND
    metadata: Metadata
    spec: InferenceServiceSpec
    status: InferenceServiceStatus = InferenceServiceStatus()

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, known_only: bool = False, is_filled: bool = False) -> Self:
        """Parse `body`, JSON from the API server. Raises InvalidResource, which names every field that is wrong.

        Unknown fields are ignored. The API server rejects or prunes fields that its CRD lacks. So an unknown field
        belongs to a newer release, during an upgrade or after a downgrade. With `known_only`, this method rejects
        unknown fields, as `kubectl` does. is_filled: the body has fields of profiles, which
        may set more than a service.
        """
        extra: Literal["ignore"] | None = None if known_only else "ignore"
        context = {"is_filled": is_filled}
        try:
            return cls.model_validate(dict(body), by_alias=True, by_name=False, extra=extra, context=context)
        except ValidationError as error:
            raise InvalidResource.of(error) from error

    @property
    def name(self) -> str:
        """Return `metadata.name`."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Return `metadata.namespace`."""
        return self.metadata.namespace

    @property
    def key(self) -> str:
        """Return `namespace/name`, as used in logs, in /demand and by the gateway."""
        return f"{self.namespace}/{self.name}"

    @property
    def task(self) -> str | None:
        """Return the task of the model, from the spec or from its files; None until a pod has read the files."""
        model = self.status.model
        return self.spec.task or (model.task if model is not None and model.uri == self.spec.model.uri else None)

    @property
    def max_model_len(self) -> int | None:
        """Return the longest request in tokens; None until a pod has read the model's files, unless the spec sets
        the limit."""
        spec, model = self.spec, self.status.model
        made_for = model.context_length if model is not None and model.uri == spec.model.uri else None
        if spec.engine.max_model_len is not None or spec.workload is None or made_for is None:
            return spec.engine.max_model_len or made_for
        return spec.workload.lengths.choose_context(made_for, spec.kv_cache.capacity_tokens)

    @property
    def batching(self) -> Batching:
        """Return `spec.batching` with the defaults for the task and the device."""
        return self.spec.settle_batching(self.task)

    @property
    def settled_spec(self) -> InferenceServiceSpec:
        """Return the spec with the settled `batching`, from which the autoscaler's targets follow."""
        return self.spec.model_copy(update={"batching": self.batching})

    @property
    def served_model_name(self) -> str:
        """Return the name that clients put in `model`."""
        return self.spec.model.name or self.name
