"""Requests, facts and a pretended model for the tests of the torch-free half of the engine."""

import zlib
from typing import Any

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.step import Sampled, StepPlan
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams

VOCAB_SIZE = 1000
EOS = 2


def make_request(request_id: str = "a", prompt: int | list[int] = 4, **params: Any) -> EngineRequest:
    """A request of `prompt` tokens (a list, or how many different ones); arrival_time, prompt_hashes by name."""
    own = {name: params.pop(name) for name in ("arrival_time", "prompt_hashes", "cache_salt") if name in params}
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    params.setdefault("max_tokens", 4)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=tokens, sampling_params=SamplingParams(**params), **own
    )


def make_state(prompt: int | list[int] = 4, **params: Any) -> RequestState:
    return RequestState(make_request("a", prompt, **params), (EOS,))


def make_facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
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
    mode: str = "continuous", *, padding: str | None = None, tokenizer: Tokenizer | None = None, **changes: Any
) -> Scheduler:
    """A scheduler; `changes` are fields of the configuration or of the facts. Static is packed if nothing is said."""
    own = {name: changes.pop(name) for name in list(changes) if name in ModelFacts.__struct_fields__}
    padding = padding or ("none" if mode == "static" else None)
    config = EngineConfig(model="none", batching_mode=mode, padding=padding, **changes)  # type: ignore[arg-type]
    return Scheduler(config, make_facts(**own), tokenizer)


def next_token(token_ids: list[int]) -> int:
    """What the pretended model says after these tokens: it depends on all of them, and is never EOS."""
    return 10 + zlib.crc32(repr(token_ids).encode()) % (VOCAB_SIZE - 10)


class PretendedModel:
    """A model runner that keeps for every KV slot whose key it holds: to attend over another than one's own is a bug.

    A step with a request in `poison`, or of more tokens than `memory_tokens`, raises, with half of its keys written.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[int, int] = {}
        self.breaks = False  # the next row's logits are not finite
        self.poison: set[str] = set()
        self.memory_tokens = 10**9

    def free_memory(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> Sampled:
        if self.poison.intersection(r.request_id for r, _ in plan.work()) or plan.num_tokens > self.memory_tokens:
            for request, num_tokens in plan.work()[::2]:
                for position in range(request.num_computed_tokens, request.num_computed_tokens + num_tokens):
                    self._slots[self._slot(request, position)] = -1
            raise RuntimeError("out of memory")
        work = plan.work()
        for request, num_tokens in work:  # all are written before any is read
            computed = request.num_computed_tokens
            for position in range(computed, computed + num_tokens):
                self._slots[self._slot(request, position)] = self._content(request, position)
        for request, num_tokens in work:
            for position in range(request.num_computed_tokens + num_tokens):
                held = self._slots.get(self._slot(request, position))
                assert held == self._content(request, position), (
                    f"{request.request_id} reads a foreign key at {position}"
                )
        token_ids = [next_token(request.token_ids) for request in plan.sampling()]
        if self.breaks and token_ids:
            self.breaks, token_ids[0] = False, -1
        return Sampled(token_ids)

    def _slot(self, request: RequestState, position: int) -> int:
        return request.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _content(self, request: RequestState, position: int) -> int:
        return zlib.crc32(repr(request.token_ids[: position + 1]).encode())


def run_step(scheduler: Scheduler, now: float = 0.0, token_id: int = 7) -> dict[str, Any]:
    """One step in which everybody samples `token_id`; the outputs by request id."""
    plan = scheduler.schedule(now)
    if plan.num_tokens:
        scheduler.update(plan, Sampled([token_id] * len(plan.sampling())))
    return {output.request_id: output for output in scheduler.take_outputs()}


def run_all(scheduler: Scheduler, now: float = 0.0) -> list[dict[str, Any]]:
    """Steps until nobody is left."""
    steps = []
    while scheduler.has_unfinished():
        steps.append(run_step(scheduler, now))
        assert len(steps) < 10_000, "the scheduler does not come to an end"
    return steps
