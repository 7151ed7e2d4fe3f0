"""The facts that the scheduler needs about a task: which requests can run, what they cost, and what they output.

The scheduler is the same for all tasks, and builds the `Task` for its model. `registry` finds the class in the task's
`scheduling` module. There are two kinds of tasks. A task that generates tokens (`tasks.generate`, `tasks.transcribe`)
stores keys and values in blocks. The other tasks (`OneStep`) have no blocks, and the result of a request is a payload.
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
    """The interface of a task: the parts of scheduling that differ between tasks."""

    @property
    def whole_prompts(self) -> bool:
        """Whether prompts are never split over several steps. If so, mode Static adds no dummy tokens."""
        ...

    @property
    def packs(self) -> bool:
        """Whether a batch costs the sum of its requests, however their lengths differ.

        If so, grouping by length gains nothing. Otherwise the model itself pads a batch of one-step requests. The
        padding counts: the batch costs its number of requests times the cost of the largest one.
        """
        ...

    @property
    def result_name(self) -> str:
        """A plural noun for the model's results, for the error if none of them is finite."""
        ...

    @property
    def dummy_cost_max(self) -> int:
        """The cost of the largest dummy."""
        ...

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request that every model of this task can compute, for the warm-up and after a failed step.

        cost: the request's share of a step's budget, in tokens or in the task's unit.
        number: requests with different numbers have different contents and ids.
        """
        ...

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequest if the request can never run.

        The API process also checks requests. Only the API process checks every token.
        """
        ...

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        """Add the step's results to its requests. Discard the results of requests that have ended meanwhile."""
        ...


class OneStep:
    """Base of all tasks without tokens to generate. The result of a request is a payload.

    A request takes one step, except in `tasks.imagegenerate`.
    """

    whole_prompts = True
    packs = False
    result_name = "results"
    not_finite = "the model's result is not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        self.dummy_cost_max = facts.max_model_len
        self._task = facts.task

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequest if the request has parameters for generated tokens."""
        if request.params is not None:
            raise wrong_task(self._task)

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        assert result.payloads is not None
        for work, payload in zip(step.work, result.payloads, strict=True):
            if work.is_wanted:
                outputs.add_payload(work, payload, self.not_finite)


class OneStepPrompt(OneStep):
    """A request is one prompt, plus a payload with details of its tokens. A batch has no padding."""

    packs = True
    dummy_payload = b""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._vocab_size, self._max_model_len = facts.vocab_size, facts.max_model_len

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request with a prompt of random tokens."""
        random = Random(number)
        token_ids = [random.randrange(self._vocab_size) for _ in range(cost)]
        return EngineRequest(request_id=str(number), prompt_token_ids=token_ids, payload=self.dummy_payload)

    def check(self, request: EngineRequest) -> None:
        super().check(request)
        num_tokens = len(request.prompt_token_ids)
        if num_tokens < 1:
            raise InvalidRequest("a request needs at least one prompt token", param="input")
        if num_tokens > self._max_model_len:
            raise InvalidRequest(
                f"{num_tokens} tokens exceed the model's context of {self._max_model_len} tokens",
                param="input",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )


def wrong_task(task: str) -> InvalidRequest:
    """Return the error for a request that an engine of this task cannot compute."""
    return InvalidRequest(f"this engine {registry.load_about(task).does} only", code=ErrorCode.WRONG_TASK)


def build_task(facts: ModelFacts) -> Task:
    """Build the task of this model."""
    make: Callable[[ModelFacts], Task] = registry.load(facts.task, "scheduling")
    return make(facts)
