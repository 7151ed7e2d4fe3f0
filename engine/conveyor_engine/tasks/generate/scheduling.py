"""Scheduling of prompts that are continued token by token."""

from itertools import repeat
from random import Random
from typing import Final

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import wrong_task
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams
from conveyor_engine.wire.step import StepResult


class Generate:
    """The task that generates text. A prompt may be split over several steps.

    A row whose logits are computed in a step gets a token. Other rows get none.
    """

    whole_prompts = False
    packs = False
    result_name = "logits"

    def __init__(self, facts: ModelFacts) -> None:
        self._task, self._vocab_size, self._max_model_len = facts.task, facts.vocab_size, facts.max_model_len
        self.dummy_cost_max = max(1, facts.max_model_len - 2)
        self._whole_images, self._step_tokens = facts.whole_images, facts.max_num_batched_tokens

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request for the warm-up, or for the check after a step that raised.

        It has `cost` random prompt tokens, and two output tokens (one if the context has no room for two). It is
        sampled greedily if `number` is even.
        """
        random = Random(number)
        return EngineRequest(
            request_id=str(number),
            prompt_token_ids=[random.randrange(self._vocab_size) for _ in range(cost)],
            params=SamplingParams(
                max_tokens=min(2, self._max_model_len - cost), ignore_eos=True, temperature=number % 2, top_p=0.9
            ),
        )

    def check(self, request: EngineRequest) -> None:
        if request.params is None:
            raise wrong_task(self._task)
        num_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if num_tokens < 1 or max_tokens < 1:
            raise InvalidRequest("a request needs at least one prompt token and one output token", param="prompt")
        if num_tokens + max_tokens > self._max_model_len:
            message = f"{num_tokens} prompt tokens and {max_tokens} output tokens exceed the model's context of"
            raise InvalidRequest(
                f"{message} {self._max_model_len} tokens", param="max_tokens", code=ErrorCode.CONTEXT_LENGTH_EXCEEDED
            )

        if self._whole_images and request.pictures:
            self._check_images(request)

    def _check_images(self, request: EngineRequest) -> None:
        """Raise InvalidRequest if an image does not fit into a step, or if its tokens would have to be scored."""
        largest = max(each.end - each.start for each in request.pictures)
        if largest > self._step_tokens:
            raise InvalidRequest(
                f"an image has {largest} tokens, which this model computes in one step, and a step of this engine has "
                f"at most {self._step_tokens} (`max_num_batched_tokens`)",
                param="messages",
            )
        if request.params is not None and request.params.prompt_logprobs is not None:
            raise InvalidRequest(
                "the tokens of an image see each other in this model, so they have no log probabilities; omit "
                "`prompt_logprobs`",
                param="prompt_logprobs",
            )

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        logprobs = repeat(None) if result.logprobs is None else result.logprobs
        sampled = zip(result.token_ids, logprobs, strict=False)
        for work in step.work:
            has_logits = work.num_logits or work.num_scored or work.sits_out
            token_ids, token_logprobs = next(sampled) if has_logits else ([], None)
            if not work.is_wanted:
                continue
            if work.num_scored and token_logprobs is not None:
                outputs.add_scores(work.request, token_logprobs[: work.num_scored])
                token_logprobs = token_logprobs[work.num_scored :] or None
            if work.num_logits > 1:
                outputs.add_tokens(work, token_ids, token_logprobs)
            else:
                outputs.add_token(work, token_ids[0] if work.num_logits else None, token_logprobs)


TASK: Final = Generate
