"""The scheduler's record of one request, from `add_request` to its last output.

`scheduler` creates it, and the other modules of this package read and change it.
"""

import math
import random
from array import array
from collections.abc import Collection
from hashlib import blake2b

from msgspec import msgpack

from conveyor_engine.errors import GenerationFailed
from conveyor_engine.scheduling.account import Account
from conveyor_engine.scheduling.constraint import Constraint
from conveyor_engine.scheduling.drafter import Drafter, DraftState
from conveyor_engine.scheduling.window_blocks import WindowBlocks
from conveyor_engine.text.detokenizer import Detokenizer
from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from conveyor_engine.wire.step import RowSampling, WantedPicture
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS

_NO_TOKENS = SamplingParams(max_tokens=0)


def _cache_root(salt: str | None, adapter: int) -> bytes:
    """Return the parent hash of the first block for this salt and adapter, whose keys and values no other request has.

    `person` makes it differ from every block's hash.
    """
    if salt is None and not adapter:
        return b""
    return blake2b(msgpack.encode((salt, adapter)), digest_size=16, person=b"cache_root").digest()


def _yields_seconds(request: EngineRequest) -> float:
    """Return the seconds that are added to the request's arrival time in the order of the queue.

    This is LEVEL_AGEING_SECONDS times its level, plus the seconds from its arrival to its deadline. These seconds
    count at most LEVEL_AGEING_SECONDS, so a short timeout never outweighs a lower level.
    """
    return request.level * LEVEL_AGEING_SECONDS + min(request.deadline - request.arrival_time, LEVEL_AGEING_SECONDS)


def _row_sampling(params: SamplingParams, num_prompt_tokens: int, stop_ids: frozenset[int]) -> RowSampling:
    seed = random.getrandbits(64) if params.seed is None else params.seed
    forbidden = tuple(stop_ids) if params.min_tokens else ()
    min_length = num_prompt_tokens + params.min_tokens
    return RowSampling(params, seed & (2**64 - 1), min_length, forbidden, num_prompt_tokens)


class RequestState:
    """The progress of one request.

    Keys and values of its first `num_computed_tokens` tokens are cached. The tokens up to `num_scheduled_tokens` are
    cached too, or are computed in an open step. `token_ids` is followed by `num_awaited_tokens` further tokens, which
    open steps sample and whose values are not known yet.

    While more than one token is pending, the request computes its prompt (or recomputes it after a preemption). When
    exactly one is pending, it decodes. There are no other phases. In a padded batch, dummy tokens follow the prompt for
    a while: see `pad`.
    """

    __slots__ = (
        "account",
        "adapter",
        "admission",
        "arrival_time",
        "block_hashes",
        "block_table",
        "cache_root",
        "constraint",
        "deadline",
        "draft_state",
        "drafter",
        "expected_total_tokens",
        "finished",
        "group",
        "held_output",
        "is_late",
        "key",
        "lateness",
        "level",
        "max_total_tokens",
        "num_awaited_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_encoded",
        "num_failed_tokens",
        "num_padding_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_scheduled_tokens",
        "num_scored_tokens",
        "num_sent_blocks",
        "num_steps",
        "padded_from",
        "params",
        "party",
        "payload",
        "payload_cost",
        "pictures",
        "place_time",
        "prediction",
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
        "window",
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
        self.key: tuple[float, ...] | None = None  # its key in the waiting queue when it was first admitted
        self.serial = -1  # its number in the order of admission
        self.token_ids = array("I", request.prompt_token_ids)  # 4 bytes a token: many prompts may wait
        self.num_prompt_tokens = len(self.token_ids)
        self.payload = request.payload
        self.pictures = request.pictures
        self.adapter = request.adapter
        self.num_steps = request.num_steps
        self.group = request.group
        self.payload_cost = request.payload_cost * request.num_steps  # of all its steps together
        self.max_total_tokens = self.num_prompt_tokens + params.max_tokens
        self.expected_total_tokens = self.max_total_tokens  # prompt and answer; the scheduler sets a better estimate
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        self.sampling = None if request.params is None else _row_sampling(params, self.num_prompt_tokens, self.stop_ids)
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_awaited_tokens = 0
        self.num_encoded = 0  # its first pictures, whose features the executor has reported
        # Number of prompt tokens whose log probabilities are known; the first token never has one. If no log
        # probabilities of the prompt are requested, this is the prompt's length.
        self.num_scored_tokens = self.num_prompt_tokens if params.prompt_logprobs is None else 0
        self.admission = 0  # changes whenever open steps for the request become invalid
        self.num_cached_tokens = 0
        self.num_padding_tokens = 0  # in a padded batch: by how many tokens its prompt is shorter than the longest
        self.padded_from: array[int] | None = None  # its own tokens, while `token_ids` has dummies after the prompt
        self.row = -1  # its index in the executor's arrays while it is admitted
        self.block_table: list[int] = []  # of the full tables: those of all tables for the first tokens, and so on
        self.window = WindowBlocks()
        self.num_sent_blocks = -1  # entries of `block_table` that the executor has; -1: its copy of the row is stale
        self.block_hashes: list[bytes] = []
        self.prompt_hashes = request.prompt_hashes
        self.cache_root = _cache_root(request.cache_salt, request.adapter)  # precedes the first block's hash
        self.num_registered_blocks = 0
        self.was_admitted = False
        self.scheduled_time = 0.0  # time of its first admission
        # When a row was free for it. Objectives measure its latencies from this time. In a closed batch, this is its
        # arrival, or the start of the previous batch if the batch started later.
        self.place_time = math.inf
        self.num_preemptions = 0
        self.account = Account()
        # In a model with states: its number of tokens when a step of it raised; 0 once it has computed them alone.
        self.num_failed_tokens = 0
        self.constraint: Constraint | None = None
        self.prediction = request.prediction
        self.drafter: Drafter | None = None  # guesses its next tokens, if it may have drafts
        self.draft_state: DraftState | None = None  # what the draft model has read of it
        self.is_late = False  # a step had to leave the row out, because its mask was not ready
        self.lateness = 0  # grows with each late mask, and falls with each one in time
        self.stop_strings: Detokenizer | None = None  # if the engine process itself must find stop strings
        self.finished: FinishReason | None = None
        self.held_output: RequestOutput | None = None  # the answer that is held back so far

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def count_steps_least(self, tokens_per_step: int) -> int:
        """Return the minimum number of steps for its whole answer.

        The step that ends the prompt yields the first token. If drafts are accepted, a step yields up to
        `tokens_per_step` tokens. A request that follows a constraint has no drafts.
        """
        if self.num_steps > 1:
            return self.num_steps
        params = self.params
        is_fixed = not self.stop_ids and not params.stop
        num_tokens = params.max_tokens if is_fixed else params.min_tokens
        return max(1, math.ceil(num_tokens / (tokens_per_step if self.constraint is None else 1)))

    @property
    def step_cost(self) -> int:
        """How much of a step's budget the request takes: its prompt, plus its payload's cost for one step."""
        return self.num_prompt_tokens + self.payload_cost // self.num_steps

    @property
    def num_input_tokens(self) -> int:
        """Its tokens so far, plus its payload's cost. In a KV cache, a payload takes as many positions as it costs."""
        return len(self.token_ids) + self.payload_cost

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that no step has scheduled yet, plus the cost of the payload or of its remaining steps."""
        return self.num_input_tokens + self.num_awaited_tokens - self.num_scheduled_tokens

    @property
    def is_scored(self) -> bool:
        """Whether all requested log probabilities of its prompt are known."""
        return self.num_scored_tokens >= self.num_prompt_tokens - 1

    def count_scored(self, num_tokens: int) -> int:
        """Return how many of its next `num_tokens` tokens need logits to score the prompt token after them."""
        if self.is_scored:
            return 0
        end = min(self.num_scheduled_tokens + num_tokens, self.num_prompt_tokens - 1)
        return max(0, end - max(self.num_scheduled_tokens, self.num_scored_tokens))

    @property
    def is_suspect(self) -> bool:
        """Whether no other request may take part in its steps, because one of them raised."""
        return self.num_failed_tokens > 0

    @property
    def awaits_its_last_token(self) -> bool:
        """Whether open steps compute its last token, so that nothing more has to be scheduled."""
        return self.num_awaited_tokens > 0 and len(self.token_ids) + self.num_awaited_tokens >= self.max_total_tokens

    def rewind(self, num_computed_tokens: int) -> None:
        """Reset the request to this number of computed tokens. The results of open steps for it become invalid."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_computed_tokens
        self.num_awaited_tokens = self.num_encoded = 0
        self.admission += 1

    @property
    def next_picture(self) -> PictureSpan | None:
        """Return the first picture that has tokens to schedule and whose features are not reported yet."""
        return next((each for each in self.pictures[self.num_encoded :] if each.end > self.num_scheduled_tokens), None)

    @property
    def wanted_picture(self) -> WantedPicture | None:
        """Return the picture that its next token waits for; None if it waits for none."""
        picture = self.next_picture
        if picture is None or picture.start > self.num_scheduled_tokens:
            return None
        return WantedPicture(picture.digest, picture.end - picture.start, self.payload)

    @property
    def held_pictures(self) -> list[bytes]:
        """Return the digests of the reported pictures that have tokens to schedule."""
        return [each.digest for each in self.pictures[: self.num_encoded] if each.end > self.num_scheduled_tokens]

    def note_encoded(self, digests: Collection[bytes]) -> bool:
        """Note the next picture if it is among those that are encoded. Returns whether it is."""
        if (picture := self.next_picture) is None or picture.digest not in digests:
            return False
        self.num_encoded = self.pictures.index(picture, self.num_encoded) + 1
        return True

    @property
    def num_live_tokens(self) -> int:
        """Number of its own tokens whose keys and values are cached, without dummies."""
        return self.num_computed_tokens if self.padded_from is None else self.num_prompt_tokens

    @property
    def steps_dummies(self) -> bool:
        """Whether its next tokens are padding: after a prompt that is not the longest, or after the answer's end."""
        return self.padded_from is not None or self.finished is not None

    def pad(self) -> None:
        """Add dummy tokens after the prompt.

        Adds one more dummy than the steps compute. So the last token is not computed, and no token is sampled from it.
        """
        self.padded_from = self.token_ids
        self.token_ids = self.token_ids[: self.num_prompt_tokens] + array("I", [0]) * (self.num_padding_tokens + 1)
        self.num_sent_blocks = -1

    def unpad(self) -> None:
        """Restore the request's own tokens. Later steps overwrite the dummies' keys and values."""
        if self.padded_from is not None:
            self.token_ids, self.padded_from = self.padded_from, None
            self.num_sent_blocks = -1
            self.num_computed_tokens = min(self.num_computed_tokens, self.num_prompt_tokens)
            self.num_scheduled_tokens = self.num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it has, in all tables."""
        return len(self.block_table) + len(self.window.blocks)

    def hashes_of_full_blocks(self, block_size: int, num_tokens: int) -> list[bytes]:
        """Return the chained hashes of the full blocks in the first `num_tokens` tokens, and perhaps of later blocks.

        Each hash covers its block and all blocks before it, so equal hashes mean equal prefixes, as in vLLM's automatic
        prefix caching. The hashes have 128 bits of a cryptographic hash, so that no client can forge a hit. The request
        keeps its hashes, and those of the prompt are computed once for all choices.
        """
        hashes, shared = self.block_hashes, self.prompt_hashes
        num_blocks = num_tokens // block_size
        hashes += shared[len(hashes) : num_blocks]
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            parent = hashes[-1] if hashes else self.cache_root
            content = self.token_ids[start : start + block_size].tobytes()
            if self.pictures:
                content += self._digests(start, start + block_size)
            hashes.append(blake2b(parent + content, digest_size=16).digest())
            if start + block_size <= self.num_prompt_tokens:
                shared.append(hashes[-1])
        return hashes

    def _digests(self, start: int, end: int) -> bytes:
        """Return the digests of the pictures that these tokens are a part of."""
        return b"".join(each.digest for each in self.pictures if each.start < end and start < each.end)

    def _finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Return why the last appended token ends the request; None if it does not. The sampler enforces min_tokens."""
        if token_id in self.stop_ids and self.num_output_tokens > self.params.min_tokens:
            return FinishReason.STOP
        if self.stop_strings is not None and self._completes_stop_string(self.stop_strings, token_id):
            return FinishReason.STOP_STRING
        return self.find_end()

    def find_end(self) -> FinishReason | None:
        """Return why no token may follow; None if one may, or if the constraint's state is not known yet."""
        if self.constraint is not None:
            if not self.constraint.is_ready or self.constraint.failure is not None:
                return None
            if self.constraint.is_complete:
                return FinishReason.STOP_STRING
        return FinishReason.LENGTH if self._is_full else None

    @property
    def _is_full(self) -> bool:
        own_tokens = self.token_ids if self.padded_from is None else self.padded_from
        return len(own_tokens) >= self.max_total_tokens

    @property
    def sits_out(self) -> bool:
        """Whether no step computes the row now: its mask is late, or its last token is known and its end is not."""
        if self.constraint is None or self.finished is not None:
            return False
        return self._is_full or (self.is_late and not self.constraint.is_ready)

    def _completes_stop_string(self, stop_strings: Detokenizer, token_id: int) -> bool:
        try:
            return stop_strings.push([token_id]).stopped
        except GenerationFailed:  # the API process decodes the same tokens and responds with this error
            self.stop_strings = None
            return False

    def append(self, token_id: int) -> FinishReason | None:
        """Append the token. Returns why the request ends with it; None if it does not end."""
        self.token_ids.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        return self._finish_reason_after(token_id)

    def output(self, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> RequestOutput:
        """Return an output of the request with these new tokens."""
        return RequestOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            scheduled_time=self.scheduled_time,
            num_predicted=(0, 0) if self.drafter is None else self.drafter.num_predicted,
        )

    def hold_output(self, output: RequestOutput) -> None:
        """Add the output to the answer that is held back."""
        if self.held_output is None:
            self.held_output = output
        else:
            self.held_output.extend(output)
