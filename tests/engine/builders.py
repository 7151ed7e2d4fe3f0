"""Builds requests, facts and schedulers, for tests of the parts of the engine that do not use torch."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.constraint import Constraint, MaskSource
from conveyor_engine.scheduling.filling import BatchLimits
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams
from conveyor_engine.wire.step import StepPlan, StepResult

T = TypeVar("T")
VOCAB_SIZE = 1000
EOS = 2


def make_request(request_id: str = "a", prompt: int | Sequence[int] = 4, **params: Any) -> EngineRequest:
    """Make a request. prompt: tokens, or their number; others: fields such as party and arrival_time."""
    names = (
        "party",
        "arrival_time",
        "prompt_hashes",
        "cache_salt",
        "level",
        "deadline",
        "pictures",
        "payload",
        "adapter",
    )
    own = {name: params.pop(name) for name in names if name in params}
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    params.setdefault("max_tokens", 4)
    return EngineRequest(request_id=request_id, prompt_token_ids=tokens, params=SamplingParams(**params), **own)


def make_state(prompt: int | list[int] = 4, request_id: str = "a", **params: Any) -> RequestState:
    return RequestState(make_request(request_id, prompt, **params), (EOS,))


def make_limits(num_rows: int, cost: float = math.inf, padded: bool = False) -> BatchLimits:
    return BatchLimits(Limits(num_rows, prompt_tokens=1000), cost, padded)


def make_facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "task": "generate",
        "max_model_len": 64,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "none",
        "num_kv_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    return ModelFacts(**(values | changes))


def make_scheduler(
    mode: str = "continuous",
    *,
    padding: str | None = None,
    tokenizer: Tokenizer | None = None,
    constrain: Callable[[EngineRequest], Constraint | None] | None = None,
    masks: MaskSource | None = None,
    slots: AdapterSlots | None = None,
    clock: Callable[[], float] = float,
    **changes: Any,
) -> Scheduler:
    """Make a scheduler. changes: fields of the configuration or of the facts. By default, Static batches are packed."""
    own = {name: changes.pop(name) for name in list(changes) if name in ModelFacts.__struct_fields__}
    padding = padding or ("none" if mode == "static" else None)
    config = EngineConfig(model="none", batching_mode=mode, padding=padding, **changes)  # type: ignore[arg-type]
    return Scheduler(config, make_facts(**own), tokenizer, constrain, masks=masks, slots=slots, clock=clock)


def names_of(requests: Iterable[RequestState]) -> list[str]:
    return [request.request_id for request in requests]


def result_of(plan: StepPlan, token_id: int = 7) -> StepResult:
    """Return a result in which each row that samples gets `token_id`."""
    return StepResult(plan.number, [[token_id]] * sum(plan.num_logits))


def run_step(scheduler: Scheduler, now: float = 0.0, token_id: int = 7) -> dict[str, Any]:
    """Run one step in which each row that samples gets `token_id`. Returns the outputs by request id."""
    plan = scheduler.schedule(now)
    if plan is not None:
        scheduler.update(result_of(plan, token_id))
    return {output.request_id: output for output in scheduler.take_outputs()}


def work_of(scheduler: Scheduler, plan: StepPlan | None) -> dict[str, int]:
    """Return how many tokens of each request the plan computes, in its order."""
    assert plan is not None
    names = {request.row: request.request_id for request in scheduler.running}
    return {names[row]: num_tokens for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True)}


def run_all(scheduler: Scheduler, now: float = 0.0) -> list[dict[str, Any]]:
    """Run steps until no request is left."""
    steps = []
    while scheduler.has_unfinished():
        steps.append(run_step(scheduler, now))
        assert len(steps) < 10_000, "the scheduler does not come to an end"
    return steps
