"""The rules of the spec about fields that a task or a runtime does not have. Made from `conveyor_protocol.tasks`.

Each rule is written once: `Field` makes its CEL and its Python from the path of a field.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pydantic.alias_generators import to_snake

from conveyor_api.base import Rule
from conveyor_api.engine import DEFAULT_QUEUED_REQUESTS
from conveyor_protocol.tasks import Allows, list_tasks


class Field(NamedTuple):
    """A field of the spec. It is set if it has another value than `default`; a list, if it has entries."""

    path: str
    default: str | int | None = None
    is_list: bool = False

    @property
    def cel(self) -> str:
        """Return the expression that is true if the field is set."""
        names = self.path.split(".")
        parts = [f"has(self.{'.'.join(names[: end + 1])})" for end in range(len(names))]
        if self.default is not None:
            parts.append(f"self.{self.path} != {self.default!r}")
        if self.is_list:
            parts.append(f"size(self.{self.path}) > 0")
        return " && ".join(parts)

    def is_set(self, spec: Any) -> bool:
        value = spec
        for name in self.path.split("."):
            value = getattr(value, to_snake(name))
            if value is None:
                return False
        return bool(value) if self.is_list else value != self.default

    @property
    def top(self) -> str:
        return self.path.partition(".")[0]


def _for_tasks(has: Callable[[Allows], bool], message: str, *fields: Field) -> Rule:
    """Return the rule that a service with another task sets none of the fields. A task that is not set is not known."""
    tasks = list_tasks(has)
    return Rule(
        f"!has(self.task) || self.task in {list(tasks)} || !({_any(fields)})",
        message,
        lambda spec: spec.task is None or spec.task in tasks or not any(field.is_set(spec) for field in fields),
        field=fields[0].top,
    )


def _not_for_vllm(message: str, *fields: Field) -> Rule:
    return Rule(
        f"self.runtime != 'VLLM' || !({_any(fields)})",
        message,
        lambda spec: spec.runtime != "VLLM" or not any(field.is_set(spec) for field in fields),
        field=fields[0].top,
    )


def _any(fields: tuple[Field, ...]) -> str:
    return " || ".join(field.cel for field in fields)


_ONE_STEP: Final = list_tasks(lambda allows: allows.one_step)
_NO_WORKLOAD: Final = list_tasks(lambda allows: not allows.workload)
_NO_OBJECTIVES: Final = list_tasks(lambda allows: not allows.objectives)
_SPECULATION: Final = list_tasks(lambda allows: allows.speculation)
_NOT_CONTINUOUS: Final = list_tasks(lambda allows: "Continuous" not in allows.modes)

TASK_RULES: Final = (
    Rule(
        f"!has(self.task) || !(self.task in {list(_NOT_CONTINUOUS)}) || !has(self.batching)"
        " || !has(self.batching.mode) || self.batching.mode != 'Continuous'",
        f"a request of tasks {' and '.join(_NOT_CONTINUOUS)} takes one step, so none can join its batch later; "
        "remove batching.mode, or set mode: Dynamic",
        lambda spec: spec.task not in _NOT_CONTINUOUS or spec.batching.mode != "Continuous",
        field="batching",
    ),
    Rule(
        "!has(self.task) || !has(self.batching) || !has(self.batching.objectives)"
        f" || self.task in {list(_NO_OBJECTIVES)}"
        f" || has(self.batching.objectives.latency) == (self.task in {list(_ONE_STEP)})",
        "batching.objectives has latency for tasks that take one step, and "
        "timeToFirstToken and interTokenLatency for Generate",
        lambda spec: (
            spec.task is None
            or spec.batching.objectives is None
            or spec.task in _NO_OBJECTIVES
            or spec.batching.objectives.of_tokens != (spec.task in _ONE_STEP)
        ),
        field="batching",
    ),
    _for_tasks(
        lambda allows: allows.objectives,
        f"batching.objectives do not apply to tasks {' and '.join(_NO_OBJECTIVES)}, because their requests take "
        "different numbers of steps; remove them",
        Field("batching.objectives"),
    ),
    Rule(
        f"!has(self.task) || !has(self.workload) || self.task in {list(_NO_WORKLOAD)}"
        f" || has(self.workload.outputTokens) != (self.task in {list(_ONE_STEP)})",
        "workload.outputTokens is required for task Generate, and must not be set for other tasks",
        lambda spec: (
            spec.task is None
            or spec.workload is None
            or spec.task in _NO_WORKLOAD
            or (spec.workload.output_tokens is not None) != (spec.task in _ONE_STEP)
        ),
        field="workload",
    ),
    _for_tasks(
        lambda allows: allows.workload,
        "workload has the lengths of texts, so it does not apply to images, audio and tensors; remove it",
        Field("workload"),
    ),
    _for_tasks(
        lambda allows: allows.max_model_len,
        "engine.maxModelLen is a length in text tokens, so it does not apply to images and audio; remove it",
        Field("engine.maxModelLen"),
    ),
    _for_tasks(
        lambda allows: allows.kv_cache,
        f"only tasks {' and '.join(list_tasks(lambda allows: allows.kv_cache))} have a KV cache; remove kvCache",
        Field("kvCache.blockBudget"),
        Field("kvCache.memoryPercent"),
        Field("kvCache.dtype", "Auto"),
    ),
    _for_tasks(
        lambda allows: allows.divides,
        "engine.tensorParallelSize is for models that generate text; remove it, or set task: Generate",
        Field("engine.tensorParallelSize", 1),
    ),
    _for_tasks(
        lambda allows: allows.adapters,
        "adapters are for models that generate text; remove them, or set task: Generate",
        Field("adapters", is_list=True),
    ),
    _for_tasks(
        lambda allows: allows.rounds,
        "model.quantization is for models that generate text; remove it, or set task: Generate",
        (_QUANTIZATION := Field("model.quantization")),
    ),
    Rule(
        "!has(self.speculation) || self.runtime == 'Conveyor' && self.engine.device != 'CUDA'"
        f" && (!has(self.task) || self.task in {list(_SPECULATION)})"
        " && (!has(self.batching.mode) || self.batching.mode != 'Static')",
        "speculation is for models that generate text on CPUs; set runtime: Conveyor, engine.device: Auto and another "
        "batching.mode than Static, or remove it",
        lambda spec: (
            spec.speculation is None
            or (
                (spec.runtime == "Conveyor" and spec.engine.device != "CUDA" and spec.batching.mode != "Static")
                and spec.task in (None, *_SPECULATION)
            )
        ),
        field="speculation",
    ),
    Rule(
        "!has(self.engine) || !has(self.engine.modelClass) || has(self.task) && self.task == 'Custom'",
        "engine.modelClass is for task Custom; set task: Custom, or remove it",
        lambda spec: spec.engine.model_class is None or spec.task == "Custom",
        field="engine",
    ),
)

RUNTIME_RULES: Final = (
    Rule(
        "self.runtime != 'VLLM' || has(self.engine.image)",
        "runtime VLLM needs engine.image: the image of vLLM that was tried with this model, for example "
        "vllm/vllm-openai:v0.11.0",
        lambda spec: spec.runtime != "VLLM" or spec.engine.image is not None,
        field="engine",
    ),
    _not_for_vllm(
        "vLLM supports only mode Continuous; set batching.mode: Continuous, or runtime: Conveyor",
        Field("batching.mode", "Continuous"),
    ),
    _not_for_vllm(
        "vLLM does not change its limits while it runs; remove batching.objectives, or set runtime: Conveyor",
        Field("batching.objectives"),
    ),
    _not_for_vllm(
        "vLLM's quantization is an argument; remove model.quantization, and set engine.args: [--quantization=...]",
        _QUANTIZATION,
    ),
    _not_for_vllm("vLLM has its own sizes; remove workload, or set runtime: Conveyor", Field("workload")),
    _not_for_vllm("vLLM detects the task of a model itself; remove task, or set runtime: Conveyor", Field("task")),
    _not_for_vllm(
        "vLLM's adapters are arguments; remove adapters, and set engine.args: [--enable-lora, --lora-modules=...]",
        Field("adapters", is_list=True),
    ),
    _not_for_vllm(
        "vLLM has no limit for the requests that wait inside it; remove engine.maxQueuedRequests",
        Field("engine.maxQueuedRequests", DEFAULT_QUEUED_REQUESTS),
    ),
    _not_for_vllm(
        "vLLM's parsers and hosts of images are arguments; remove engine.toolParser, engine.reasoningParser and "
        "engine.mediaHosts, and set engine.args: [--tool-call-parser=..., --allowed-media-domains=...]",
        Field("engine.toolParser", "Auto"),
        Field("engine.reasoningParser", "Auto"),
        Field("engine.mediaHosts", is_list=True),
    ),
    _not_for_vllm(
        "the type of vLLM's cache is an argument; remove kvCache.dtype, and set engine.args: [--kv-cache-dtype=...]",
        Field("kvCache.dtype", "Auto"),
    ),
    _not_for_vllm(
        "the number of vLLM's GPUs is an argument; remove engine.tensorParallelSize, and set engine.args: "
        "[--tensor-parallel-size=...]",
        Field("engine.tensorParallelSize"),
    ),
    Rule(
        f"self.runtime == 'VLLM' || !({(_ARGS := Field('engine.args', is_list=True)).cel})",
        "engine.args are arguments of vLLM; set runtime: VLLM, or remove them",
        lambda spec: spec.runtime == "VLLM" or not _ARGS.is_set(spec),
        field="engine",
    ),
)
