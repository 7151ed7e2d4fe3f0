"""The scheduler's record of one request, from `add_request` to its last output.

Owned by `scheduler`; `policy` and `step` read it. Nothing outside this room sees it.
"""

import math
import random
from array import array
from hashlib import blake2b
from typing import Protocol

from conveyor_engine.errors import GenerationFailed
from conveyor_engine.text.detokenizer import Detokenizer
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from conveyor_engine.wire.step import RowSampling
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS

_NO_TOKENS = SamplingParams(max_tokens=0)


class Constraint(Protocol):
    """What limits the tokens that a request may be given next, such as a grammar: its state after those so far.

    It lives on the host and gets only tokens that the request keeps, so steps that run ahead need no rollback.
    """

    def accept(self, token_id: int) -> None:
        """The request has been given this token, which was allowed."""
        ...

    def build_mask(self) -> bytes:
        """The tokens that may come next: see `wire.step.RowMask.allowed`. Without any the request ends in an error."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come next but the answer's end."""
        ...


def _cache_root(salt: str | None) -> bytes:
    """Personalized, so that no salt's root can equal the hash of a block."""
    return b"" if salt is None else blake2b(salt.encode(), digest_size=16, person=b"cache_salt").digest()


def _yields_seconds(request: EngineRequest) -> float:
    """To requests that come within so much time after it, and yield to nobody: by its level, and until its deadline.

    A deadline further away than one level counts like none. So a short time-out is worth less than a better level.
    """
    return request.level * LEVEL_AGEING_SECONDS + min(request.deadline - request.arrival_time, LEVEL_AGEING_SECONDS)


def _row_sampling(params: SamplingParams, num_prompt_tokens: int, stop_ids: frozenset[int]) -> RowSampling:
    seed = random.getrandbits(64) if params.seed is None else params.seed
    forbidden = tuple(stop_ids) if params.min_tokens else ()
    min_length = num_prompt_tokens + params.min_tokens
    return RowSampling(params, seed & (2**64 - 1), min_length, forbidden, num_prompt_tokens)


class RequestState:
    """Progress of one request. `num_computed_tokens` of its tokens have their keys and values cached;
    `num_scheduled_tokens` too, or a step that is not over computes them. Behind its `token_ids` there are
    `num_awaited_tokens` that such steps sample, with values not known yet.

    A request is computing its prompt (or recomputing after preemption) while more than one token
    is pending, and decoding when exactly one is: there are no phases beyond that. The padding of a padded batch is
    dummy tokens that follow the prompt for a while: `pad`.
    """

    __slots__ = (
        "admission",
        "arrival_time",
        "block_hashes",
        "block_table",
        "cache_root",
        "constraint",
        "deadline",
        "expected_total_tokens",
        "finished",
        "held_output",
        "key",
        "level",
        "max_total_tokens",
        "num_awaited_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_padding_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_scheduled_tokens",
        "num_scored_tokens",
        "num_sent_blocks",
        "padded_from",
        "params",
        "party",
        "payload",
        "payload_cost",
        "place_time",
        "prompt_hashes",
        "request_id",
        "row",
        "sampling",
        "scheduled_time",
        "serial",
        "stop_ids",
        "stop_strings",
        "token_ids",
        "was_admitted",
        "yields_seconds",
    )

    def __init__(self, request: EngineRequest, eos_token_ids: tuple[int, ...]) -> None:
        params = request.params or _NO_TOKENS
        self.request_id = request.request_id
        self.party = request.party or request.request_id
        self.params = params
        self.arrival_time = request.arrival_time
        self.level = request.level
        self.deadline = request.deadline
        self.yields_seconds = _yields_seconds(request)
        self.key: tuple[float, ...] | None = None  # in the waiting queue, when it was first admitted
        self.serial = -1  # its place in the order of admission
        self.token_ids = array("I", request.prompt_token_ids)  # 4 bytes a token: many prompts may wait
        self.num_prompt_tokens = len(self.token_ids)
        self.payload = request.payload
        self.payload_cost = request.payload_cost
        self.max_total_tokens = self.num_prompt_tokens + params.max_tokens
        self.expected_total_tokens = self.max_total_tokens  # the scheduler knows better
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        self.sampling = None if request.params is None else _row_sampling(params, self.num_prompt_tokens, self.stop_ids)
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_awaited_tokens = 0
        # Of its prompt, from the second on, those with a log probability; all, if none are asked for.
        self.num_scored_tokens = self.num_prompt_tokens if params.prompt_logprobs is None else 0
        self.admission = 0  # another number whenever what steps compute for it is no longer wanted
        self.num_cached_tokens = 0
        self.num_padding_tokens = 0  # what its prompt lacks to the longest of a padded batch
        self.padded_from: array[int] | None = None  # its own tokens, while `token_ids` shows dummies behind the prompt
        self.row = -1  # its place in the executor's arrays while it is admitted
        self.block_table: list[int] = []
        self.num_sent_blocks = -1  # of its table, what the executor knows; -1: it does not know the row as it is
        self.block_hashes: list[bytes] = []
        self.prompt_hashes = request.prompt_hashes
        self.cache_root = _cache_root(request.cache_salt)  # before the first block's hash
        self.num_registered_blocks = 0
        self.was_admitted = False
        self.scheduled_time = 0.0  # when it was admitted first
        self.place_time = math.inf  # since when only steps have delayed it, and no request that had its row
        self.num_preemptions = 0
        self.constraint: Constraint | None = None
        self.stop_strings: Detokenizer | None = None  # where only the engine can find them in time
        self.finished: FinishReason | None = None
        self.held_output: RequestOutput | None = None  # what has been kept back so far

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_steps_least(self) -> int:
        """Steps that its whole answer takes at least. The first token comes of the step that ends the prompt."""
        params = self.params
        is_fixed = not self.stop_ids and not params.stop
        return max(1, params.max_tokens if is_fixed else params.min_tokens)

    @property
    def prompt_cost(self) -> int:
        """Of a step's budget, in tokens, for all that it brought."""
        return self.num_prompt_tokens + self.payload_cost

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that no step computes yet, and what its payload costs."""
        return len(self.token_ids) + self.payload_cost + self.num_awaited_tokens - self.num_scheduled_tokens

    @property
    def is_scored(self) -> bool:
        """Whether all tokens of its prompt have the log probabilities that are asked for."""
        return self.num_scored_tokens >= self.num_prompt_tokens - 1

    def count_scored(self, num_tokens: int) -> int:
        """Of its next so many tokens, those whose logits give the prompt's next token its log probability."""
        if self.is_scored:
            return 0
        end = min(self.num_scheduled_tokens + num_tokens, self.num_prompt_tokens - 1)
        return max(0, end - max(self.num_scheduled_tokens, self.num_scored_tokens))

    @property
    def awaits_its_last_token(self) -> bool:
        """Whether the steps that are not over bring it to its end: there is nothing more to compute."""
        return self.num_awaited_tokens > 0 and len(self.token_ids) + self.num_awaited_tokens >= self.max_total_tokens

    def rewind(self, num_computed_tokens: int) -> None:
        """Only these tokens are computed; what steps that are not over compute for it is not wanted."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_computed_tokens
        self.num_awaited_tokens = 0
        self.admission += 1

    @property
    def num_live_tokens(self) -> int:
        """Of its own tokens, those whose keys and values are cached."""
        return self.num_computed_tokens if self.padded_from is None else self.num_prompt_tokens

    @property
    def steps_dummies(self) -> bool:
        """Whether the tokens it steps now are padding: behind a shorter prompt, or of a row that is finished."""
        return self.padded_from is not None or self.finished is not None

    def pad(self) -> None:
        """Dummy tokens follow the prompt, one more than are to be computed, so that the last samples nothing."""
        self.padded_from = self.token_ids
        self.token_ids = self.token_ids[: self.num_prompt_tokens] + array("I", [0]) * (self.num_padding_tokens + 1)
        self.num_sent_blocks = -1

    def unpad(self) -> None:
        """Its own tokens again. Their keys and values are written over those of the dummies."""
        if self.padded_from is not None:
            self.token_ids, self.padded_from = self.padded_from, None
            self.num_sent_blocks = -1
            self.num_computed_tokens = min(self.num_computed_tokens, self.num_prompt_tokens)
            self.num_scheduled_tokens = self.num_computed_tokens

    def hashes_of_full_blocks(self, block_size: int, num_tokens: int) -> list[bytes]:
        """Chained hashes of the full blocks within the first `num_tokens` tokens, at least (cached).

        Each hash covers its block and all before it, so equal hashes mean equal prefixes (vLLM's
        automatic prefix caching; 128 bits of a cryptographic hash, so that nobody can forge a hit). Those of the
        prompt are computed once for all its choices.
        """
        hashes, shared = self.block_hashes, self.prompt_hashes
        num_blocks = num_tokens // block_size
        hashes += shared[len(hashes) : num_blocks]
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            parent = hashes[-1] if hashes else self.cache_root
            tokens = self.token_ids[start : start + block_size].tobytes()
            hashes.append(blake2b(parent + tokens, digest_size=16).digest())
            if start + block_size <= self.num_prompt_tokens:
                shared.append(hashes[-1])
        return hashes

    def _finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Whether the token just appended ends the request, and why. min_tokens is the sampler's part."""
        if token_id in self.stop_ids and self.num_output_tokens > self.params.min_tokens:
            return FinishReason.STOP
        if self._completes_stop_string(token_id) or (self.constraint is not None and self.constraint.is_complete):
            return FinishReason.STOP_STRING
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _completes_stop_string(self, token_id: int) -> bool:
        if self.stop_strings is None:
            return False
        try:
            return self.stop_strings.push([token_id]).stopped
        except GenerationFailed:  # the API process decodes the same tokens, and answers with this error
            self.stop_strings = None
            return False

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Takes the tokens up to the one that ends the request; those taken, and why it ended."""
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if self.constraint is not None:
                self.constraint.accept(token_id)
            reason = self._finish_reason_after(token_id)
            if reason is not None:
                return token_ids[: index + 1], reason
        return token_ids, None

    def output(self, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> RequestOutput:
        """What the caller is told about this request now."""
        return RequestOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            scheduled_time=self.scheduled_time,
        )

    def hold_output(self, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Adds the tokens to the answer that is kept back."""
        if self.held_output is None:
            self.held_output = self.output(list(new_token_ids), logprobs)
            return
        self.held_output.new_token_ids += new_token_ids
        if logprobs is not None and self.held_output.logprobs is not None:
            self.held_output.logprobs += logprobs
