"""What the scheduler knows of a task: which requests can run, what they cost, and what their outputs are.

Made by `scheduler`, which is the same for all tasks. `registry` finds the one of the engine's model, whose `scheduling`
module has it. Two kinds are known here: a task that steps by tokens (`tasks.generate`) computes a prompt in pieces and
keeps its keys and values in blocks; one that takes one step (`OneStep`) keeps nothing but the payload that comes out.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from conveyor_engine import registry
from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.step import StepResult


class Task(Protocol):
    """What differs between tasks."""

    @property
    def whole_prompts(self) -> bool:
        """Whether a request is computed in one step, and so is never padded."""
        ...

    @property
    def packs(self) -> bool:
        """Whether a batch costs the sum of its requests, however their lengths differ. So it gains nothing by grouping.

        A batch of one-step requests that does not pack is padded: it costs its number times its largest request.
        """
        ...

    @property
    def result_name(self) -> str:
        """What the model computes, in the plural, for the error if none of it is finite."""
        ...

    @property
    def dummy_cost_max(self) -> int:
        """The cost of the largest dummy."""
        ...

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """A request that every model of this task can compute, for warm-up and after a failed step; its id is free.

        `cost` is what all it brings takes of a step's budget; `number` makes it differ from others.
        """
        ...

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest if it could never be run. The API process checks too, and it alone reads all of it."""
        ...

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        """Adds the results of the step to its requests. Those of requests that left meanwhile are discarded."""
        ...


class OneStep:
    """The part that all tasks share whose requests take one step: what comes out is a payload."""

    whole_prompts = True
    packs = False
    result_name = "results"
    not_finite = "the model's result is not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        self.dummy_cost_max = facts.max_model_len
        self._task = facts.task

    def check(self, request: EngineRequest) -> None:
        """Refuses what asks for tokens."""
        if request.params is not None:
            raise wrong_task(self._task)

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        assert result.payloads is not None
        for work, payload in zip(step.work, result.payloads, strict=True):
            if work.is_wanted:
                outputs.add_payload(work, payload, self.not_finite)


class OneStepPrompt(OneStep):
    """A request is one whole prompt of tokens, and what its payload says of them. A batch has no padding."""

    packs = True
    dummy_payload = b""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._vocab_size, self._max_model_len = facts.vocab_size, facts.max_model_len

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """A prompt of random tokens."""
        random = Random(number)
        token_ids = [random.randrange(self._vocab_size) for _ in range(cost)]
        return EngineRequest(request_id=str(number), prompt_token_ids=token_ids, payload=self.dummy_payload)

    def check(self, request: EngineRequest) -> None:
        super().check(request)
        num_tokens = len(request.prompt_token_ids)
        if num_tokens < 1:
            raise InvalidRequest("a request needs a token of prompt, at least", param="input")
        if num_tokens > self._max_model_len:
            raise InvalidRequest(
                f"{num_tokens} tokens are more than the context of {self._max_model_len}",
                param="input",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )


def wrong_task(task: str) -> InvalidRequest:
    """The error for a request that an engine of this task cannot compute."""
    return InvalidRequest(f"this engine {registry.load_about(task).does} only", code=ErrorCode.WRONG_TASK)


def build_task(facts: ModelFacts) -> Task:
    """The task of this model."""
    make: Callable[[ModelFacts], Task] = registry.load(facts.task, "scheduling")
    return make(facts)
