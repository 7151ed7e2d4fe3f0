"""What travels between the API process and the engine core: requests in, tokens or payloads out.

Built by `serving.preparing`, carried by `serving.engine_client`, consumed and produced by `core`. Plain msgspec
structs, so the same objects cross the process boundary. A payload is what a task carries beside tokens: here it is
bytes, which the task alone reads. Knows neither HTTP nor torch, and no task.
"""

import math
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import msgspec


class FinishReason(StrEnum):
    """Why a request ended; every request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence or stop token; for callers of the API a stop string too
    STOP_STRING = "stop_string"  # a stop string, found by the engine, or a grammar's end: the last token is text
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client left, or the server is going away
    DEADLINE = "deadline"  # the request's deadline passed
    ERROR = "error"  # the engine failed; `message` says why


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """How the next token is chosen, and when to stop. The API process validates the values."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token and what is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # the tokens of each
    seed: int | None = None  # fixes the random stream, keyed by (seed, position)
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the API process ends an answer at these; the engine only where answers are held back
    skip_special_tokens: bool = True  # in the text that stop strings are found in
    logprobs: int | None = None  # number of top log probabilities per token; 0 = only the chosen one
    logprob_token_ids: tuple[int, ...] = ()  # in place of the top ones
    prompt_logprobs: int | None = None  # the same number for each token of the prompt but the first


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """The tokens around the thinking before an answer."""

    begin: int
    end: int
    has_begun: bool  # in the prompt; else the answer's first token may begin it
    budget: int | None = None  # tokens, after which it has to end; None: any number


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to compute: tokens, a payload, or both. `n > 1` is n of these, which share the prompt's list.

    Those of one HTTP request are one party, of any name that no other has: parties take turns (`scheduling`).
    """

    request_id: str
    party: str | None = None  # None: it is alone
    prompt_token_ids: Sequence[int] = ()
    payload: bytes = b""  # what else its model's runner reads: numbers, pixels, parameters, as the task encodes them
    payload_cost: int = 0  # of a step's budget, beside the prompt's tokens, in the unit of the task
    params: SamplingParams | None = None  # None: no tokens are sampled
    grammar: str = ""  # that the answer follows, as `text.grammar` builds it
    thinking: Thinking | None = None  # behind which the grammar begins, or which has a budget
    level: int = 0  # lower ones go first
    deadline: float = math.inf  # time.monotonic() seconds: after it nobody wants the answer
    arrival_time: float = 0.0  # time.monotonic() seconds: at the head of its HTTP request, in the engine its own
    cache_salt: str | None = None  # prefixes are shared only with requests of the same salt
    prompt_hashes: list[bytes] = msgspec.field(default_factory=list)  # of its full blocks so far; choices share it too


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token, and the top alternatives, best first.

    Many wait for a slow reader, or for the end of an answer: so they are packed, and unpacked when they are shown.
    """

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    packed_ids: bytes  # uint32 each
    packed_logprobs: bytes  # float32 each
    rank: int = 0  # of the chosen token, from 1 on; 0: not told

    @classmethod
    def of(
        cls, token_id: int, logprob: float | None, top_token_ids: list[int], top_logprobs: list[float], rank: int = 0
    ) -> Self:
        """Packs them."""
        return cls(token_id, logprob, array("I", top_token_ids).tobytes(), array("f", top_logprobs).tobytes(), rank)

    @property
    def top_token_ids(self) -> list[int]:
        """The token ids of the alternatives."""
        return array("I", self.packed_ids).tolist()

    @property
    def top_logprobs(self) -> list[float]:
        """Theirs, in the same order."""
        return array("f", self.packed_logprobs).tolist()


class RequestOutput(msgspec.Struct, kw_only=True, array_like=True):
    """What one step gave one request. The last one of a request carries `finish_reason`."""

    request_id: str
    new_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    scheduled_time: float = 0.0  # time.monotonic() seconds of its first step; 0: it never had one
    payload: bytes | None = None  # what came of it, where that is no tokens
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next tokens of the prompt, from the second on

    @property
    def has_failed(self) -> bool:
        """Whether it ends the request without a whole answer."""
        return self.finish_reason in (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)

    def extend(self, later: "RequestOutput") -> None:
        """Becomes what both say, as if one step had given it."""
        self.new_token_ids += later.new_token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *later.prompt_logprobs]
        self.finish_reason, self.message, self.payload = later.finish_reason, later.message, later.payload
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.num_preemptions, self.scheduled_time = later.num_preemptions, later.scheduled_time


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What was found out while the model was loaded; the API process validates requests against it."""

    task: str  # the engine's one task: its name in `registry`
    max_model_len: int  # tokens of the longest request, prompt + output
    vocab_size: int = 0  # 0: the task has no tokens
    eos_token_ids: tuple[int, ...] = ()
    dtype: str
    device: str
    attention_backend: str
    num_kv_blocks: int  # 0: the task keeps no keys and values
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_held: int | None = None  # requests of the expected lengths that the KV cache holds; None: a batch, or not known
    of_task: bytes = b""  # what only the task knows to read


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """A snapshot of the engine: gauges, and counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0..1, blocks that some request holds
    num_carried: int | None = None  # requests that the KV cache carried at once lately; None: it was not short
    max_running: int | None = None  # requests that may run at once, by the objectives; None: they ask for no limit
    max_prompt_tokens: int | None = None  # of a step, likewise
    limit_reason: str | None = None  # why: see `objectives.steering`; None: there are no objectives
    limit_moves: dict[str, int] = msgspec.field(default_factory=dict)  # by reason
    step_num_seqs: int = 0  # requests that took part in the newest step
    step_num_tokens: int = 0  # tokens of the newest step, padding included
    batch_cost: int = 0  # of the batch that closed last, in the unit of the task
    batch_padding_share: float = 0.0  # of that cost, 0..1
    batch_wait_seconds: float = 0.0  # from the arrival of its first request until it closed
    # counters
    num_steps: int = 0
    num_batches: int = 0  # that closed
    num_preemptions: int = 0
    num_late: int = 0  # requests that were dropped before their first step: they could not meet their deadlines
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prompt_tokens: int = 0  # prompt tokens computed or found in the prefix cache ...
    prompt_tokens_cached: int = 0  # ... and those of them that were found there
    generation_tokens: int = 0
    padding_tokens: int = 0  # dummy tokens stepped (static)
    kv_live_token_steps: int = 0  # sum over steps of tokens held in the KV cache ...
    kv_allocated_token_steps: int = 0  # ... and of the room allocated for them; waste = 1 - live / allocated
    batch_close_reasons: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # full, cost, window, eager, kv_blocks, drain

    @property
    def capacity(self) -> int | None:
        """Requests that run at once, where KV cache or objectives allow fewer than a batch; None: a batch."""
        return min((each for each in (self.num_carried, self.max_running) if each is not None), default=None)
