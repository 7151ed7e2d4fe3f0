"""Divides the tokens of a step among its requests (chunked prefill). Used by `running_batch` only.

This follows Sarathi-Serve (Agrawal et al., OSDI'24), with vLLM's limit on all long prompts together.
"""

from collections.abc import Collection, Iterable
from itertools import chain

from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import ModelFacts

# Share of a step's tokens. A prompt with more tokens than this share is called long, and so is a prompt with images
# that are not computed, because the step also encodes them. While other requests decode, all long prompts together get
# this share.
LONG_PROMPT_SHARE = 0.25
# Share of prompts with such images where images are encoded beside steps: the request waits for them anyway, and the
# others' steps should neither stop for the encoder nor for its many tokens.
IMAGE_PROMPT_SHARE = 1 / 32


class TokenBudget:
    """A step has `max_num_batched_tokens`. Long prompts get a share of them, so that they do not delay decodes.

    All prompts together get at most `limits.prompt_tokens` in a step. The tokens of decodes do not count there.
    """

    def __init__(self, facts: ModelFacts, limits: Limits, *, joins: bool, whole_prompts: bool, packs: bool) -> None:
        """joins: requests may join while others run. whole_prompts: prompts are not split. packs: see `tasks.Task`."""
        self._limits = limits
        self._max_tokens = facts.max_num_batched_tokens
        self._whole_prompts, self._whole_images = whole_prompts, facts.whole_images
        self._packs = packs
        self._waits_for_images = joins and facts.encodes_beside
        self._limits_long_prompts = joins and not whole_prompts
        self._long_prompt_tokens = max(1, int(self._max_tokens * LONG_PROMPT_SHARE))
        self._image_budget = 0  # the rest of this step's tokens for prompts with images that are not computed
        self._long_prompt_budget = 0  # the rest of this step's tokens for long prompts

    def start_step(
        self, running: Collection[RequestState], joining: Iterable[RequestState], *, images_first: bool = False
    ) -> None:
        """Set the budget of long prompts: a share of the step if it has decodes, else the rest after short prompts.

        If `limits.prompt_tokens` is below the step's tokens, prompts cannot delay decodes much. Then long prompts get
        the rest after short prompts, even if the step has decodes. images_first: see `image_turns`; then prompts with
        images have the share of long prompts.
        """
        self._long_prompt_budget = self._image_budget = limit = min(self._max_tokens, self._limits.prompt_tokens)
        if not self._limits_long_prompts:
            return
        share = max(1, int(limit * LONG_PROMPT_SHARE))
        if limit == self._max_tokens and any(request.num_pending_tokens == 1 for request in running):
            self._long_prompt_budget = share
            if self._waits_for_images and not images_first:
                self._image_budget = max(1, int(limit * IMAGE_PROMPT_SHARE))
            return
        pending = ((each, each.num_pending_tokens) for each in chain(running, joining))
        short = sum(number for request, number in pending if number > 1 and not self._is_long(request, number))
        self._long_prompt_budget = max(share, limit - short)

    def _is_long(self, request: RequestState, num_pending: int) -> bool:
        """Return whether the prompt counts as long: by its pending tokens, or by an image that is not computed."""
        return _has_images_left(request) or num_pending > self._long_prompt_tokens

    def has_room(self, step: Step, request: RequestState) -> bool:
        """Return whether the step has room for tokens of a request that would join."""
        if self._whole_prompts:
            return self._whole_chunk(step, request) > 0
        return self.room(step) > 0

    def room(self, step: Step) -> int:
        """Return how many more prompt tokens the step has room for."""
        return min(self._max_tokens - step.num_tokens, self._limits.prompt_tokens - step.num_prompt_tokens)

    def chunk(self, step: Step, request: RequestState) -> int:
        """Return how many of its pending tokens the request computes in this step."""
        if request.awaits_its_last_token:
            return 0
        if self._whole_prompts:
            return self._whole_chunk(step, request)
        num_pending = request.num_pending_tokens
        is_decode = num_pending == 1
        budget = max(0, self._max_tokens - step.num_tokens if is_decode else self.room(step))
        is_long = not is_decode and self._is_long(request, num_pending)
        if is_long:
            budget = max(0, min(budget, self._long_prompt_budget))
        if has_images := self._waits_for_images and is_long and _has_images_left(request):
            budget = max(0, min(budget, self._image_budget))
        num_tokens = min(num_pending - (request.padded_from is not None), budget)
        if self._waits_for_images and request.pictures and (picture := request.next_picture) is not None:
            num_tokens = min(num_tokens, max(0, picture.start - request.num_scheduled_tokens))
        if self._whole_images and num_tokens:
            num_tokens = self._end_outside_images(step, request, num_tokens)
        self._long_prompt_budget -= num_tokens * is_long
        self._image_budget -= num_tokens * has_images
        return num_tokens

    def _end_outside_images(self, step: Step, request: RequestState, num_tokens: int) -> int:
        """Return how many tokens the request computes, so that none of its images is cut: up to an image, or all of it.

        An image may exceed the budgets of prompts, but not the step; 0: it waits for a step with fewer other tokens.
        """
        begin = request.num_scheduled_tokens
        cut = next((each for each in request.pictures if each.start < begin + num_tokens < each.end), None)
        if cut is None:
            return num_tokens
        if begin < cut.start:
            return cut.start - begin
        rest = cut.end - begin
        return rest if rest <= self._max_tokens - step.num_tokens else 0

    def _whole_chunk(self, step: Step, request: RequestState) -> int:
        """Return the length of the whole prompt, or the cost of the payload's next step; 0: the request waits.

        A prompt longer than the budget gets a separate step."""
        num_tokens = min(request.num_pending_tokens, request.step_cost)
        if num_tokens == 1 and request.num_scheduled_tokens and request.sampling is not None:  # a decode
            return int(step.num_tokens < self._max_tokens)
        padded_cost = (len(step.prefills) + len(step.decodes) + 1) * max(step.largest_tokens, num_tokens)
        fits = num_tokens <= self.room(step) if self._packs else padded_cost <= self._max_tokens
        return num_tokens if fits or not step.num_tokens else 0


def _has_images_left(request: RequestState) -> bool:
    """Return whether the prompt has images that are not computed."""
    return bool(request.pictures) and request.pictures[-1].end > request.num_scheduled_tokens
