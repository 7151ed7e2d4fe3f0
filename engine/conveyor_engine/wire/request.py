"""Messages between the API process and the engine core: requests in, tokens or payloads out.

`serving.preparing` builds requests, `serving.engine_client` sends them, and `core` computes them and returns outputs.
Plain msgspec structs, so the same objects cross the process boundary. A payload is a task's data other than tokens;
this module has it as bytes, which only the task can read. Knows neither HTTP nor torch, and no task.
"""

import math
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Self

import msgspec

from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_engine.wire.pictures import PictureSpan

NO_IMAGES: Final = "this engine's model reads no images"


class FinishReason(StrEnum):
    """Why a request ended. Every request ends with exactly one reason."""

    STOP = "stop"  # an end-of-sequence or stop token; in responses of the API also a stop string
    STOP_STRING = "stop_string"  # the engine found a stop string or the end of a grammar; the last token is kept
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client disconnected, or the server shuts down
    DEADLINE = "deadline"  # the request's deadline passed
    FORBIDDEN = "forbidden"  # the request's parameters allow no next token; `message` names them
    COSTLY = "costly"  # the request's structured output takes too much processor time; `message` says how much
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
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token and the number that is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # the tokens of each word
    seed: int | None = None  # fixes the random stream, keyed by (seed, position)
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # searched by the API process; in static mode, by the engine too
    skip_special_tokens: bool = True  # whether stop strings are searched in the text without special tokens
    logprobs: int | None = None  # number of top log probabilities per token; 0 = only the chosen one
    logprob_token_ids: tuple[int, ...] = ()  # return log probabilities of these tokens instead of the top ones
    prompt_logprobs: int | None = None  # like `logprobs`, for each token of the prompt except the first


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that begin and end the thinking before an answer."""

    begin: int
    end: int
    has_begun: bool  # True: the prompt ends inside the thinking. False: the answer's first token may begin it
    budget: int | None = None  # the most tokens of thinking; None: no limit


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the engine. The input is tokens, a payload, or both.

    A client's request with `n` > 1 becomes n engine requests, which share the list of the prompt's tokens. The engine
    requests of one HTTP request form a party, with a name that no other party has. Parties take turns (`scheduling`).
    """

    request_id: str
    party: str | None = None  # None: a party of one
    prompt_token_ids: Sequence[int] = ()
    payload: bytes = b""  # other input of the model's runner (numbers, pixels, parameters), as the task encodes it
    payload_cost: int = 0  # the payload's share of a step's budget, added to the prompt's tokens, in the task's unit
    pictures: Sequence[PictureSpan] = ()  # in the prompt; the payload has their content
    num_steps: int = 1  # for a payload that is computed in several steps, each of which costs `payload_cost`
    group: int = 0  # only requests with equal numbers share a forward pass (images of one size); 0: no restriction
    params: SamplingParams | None = None  # None: no tokens are sampled
    grammar: str = ""  # the grammar that the answer follows, from `text.grammar`; empty: none
    thinking: Thinking | None = None  # set if a grammar begins after the thinking, or if the thinking has a budget
    level: int = 0  # lower levels run first
    deadline: float = math.inf  # time.monotonic() seconds; after it the request is dropped
    # time.monotonic() seconds. In the API process and its workers: when the HTTP request's head arrived. In the engine
    # process: when the engine request arrived there.
    arrival_time: float = 0.0
    cache_salt: str | None = None  # prefixes are shared only with requests of the same salt
    adapter: int = 0  # its number in the setting `adapters`, from 1; 0: the model without an adapter
    prediction: Sequence[int] = ()  # tokens that the client expects as the answer: drafts, if the engine speculates
    prompt_hashes: list[bytes] = msgspec.field(default_factory=list)  # hashes of full blocks so far; choices share this


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token, and the top alternatives, best first.

    The alternatives are packed to save memory: many are held for a slow client, or until the end of an answer. They are
    unpacked when the response is written.
    """

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    packed_ids: bytes  # uint32 each
    packed_logprobs: bytes  # float32 each
    rank: int = 0  # of the chosen token, from 1; 0: not computed

    @classmethod
    def of(
        cls, token_id: int, logprob: float | None, top_token_ids: list[int], top_logprobs: list[float], rank: int = 0
    ) -> Self:
        """Pack the alternatives, given as token ids and log probabilities in the same order."""
        return cls(token_id, logprob, array("I", top_token_ids).tobytes(), array("f", top_logprobs).tobytes(), rank)

    @property
    def top_token_ids(self) -> list[int]:
        """Return the token ids of the alternatives."""
        return array("I", self.packed_ids).tolist()

    @property
    def top_logprobs(self) -> list[float]:
        """Return the log probabilities of the alternatives, in the order of `top_token_ids`."""
        return array("f", self.packed_logprobs).tolist()


class Receipt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a request has used of the engine's steps, and where its time went. All times are in seconds.

    The `engine_seconds` of all requests add up to the time of all steps.
    """

    engine_seconds: float = 0.0  # its part of the time of its steps
    padding_seconds: float = 0.0  # what dummies cost of that
    queue_seconds: float = 0.0  # from its arrival to its first step, without `batch_wait_seconds`
    batch_wait_seconds: float = 0.0  # how long its batch was not started, although it could have run
    prefill_seconds: float = 0.0  # from its first step to its first token or its result
    decode_seconds: float = 0.0  # from then to its end
    neighbours: float = 0.0  # mean number of other requests in its steps
    close_reason: str | None = None  # why its batch closed; None if it was not in one that closes
    preempted_at: tuple[float, ...] = ()  # time.monotonic() of its first preemptions

    @property
    def total_seconds(self) -> float:
        """Return the time from its arrival to its end."""
        return self.queue_seconds + self.batch_wait_seconds + self.prefill_seconds + self.decode_seconds


class RequestOutput(msgspec.Struct, kw_only=True, array_like=True):
    """The output of one step for one request. A request's last output has a `finish_reason`."""

    request_id: str
    new_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    scheduled_time: float = 0.0  # time.monotonic() seconds of the request's first step; 0: it had no step
    payload: bytes | None = None  # a result that is not tokens, which only the task can read
    prompt_logprobs: list[TokenLogprobs] | None = None  # for the next tokens of the prompt, beginning with the second
    receipt: Receipt | None = None  # with the finish reason, if the engine process ends the request
    num_predicted: tuple[int, int] = (0, 0)  # accepted and rejected drafts from the request's prediction so far

    @property
    def has_failed(self) -> bool:
        """Return whether this output ends the request before its answer is complete."""
        return self.finish_reason in (
            FinishReason.ABORT,
            FinishReason.DEADLINE,
            FinishReason.FORBIDDEN,
            FinishReason.COSTLY,
            FinishReason.ERROR,
        )

    def extend(self, later: "RequestOutput") -> None:
        """Append a later output of the same request, as if one step had produced both."""
        self.new_token_ids += later.new_token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *later.prompt_logprobs]
        self.finish_reason, self.message = later.finish_reason, later.message
        self.payload = self.payload if later.payload is None else later.payload
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.num_preemptions, self.scheduled_time = later.num_preemptions, later.scheduled_time
        self.num_predicted = later.num_predicted


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Facts about the loaded model, against which the API process validates requests."""

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
    # Requests of the declared lengths that fit the KV cache; None: a whole batch fits, or no lengths are declared.
    num_held: int | None = None
    num_lost_graphs: int = 0  # CUDA graphs that could not be captured, so their steps launch each kernel
    of_task: bytes = b""  # facts that only the task can decode
    # Whether layers keep a state for each row: no prefix is shared, and a failed step's requests begin again.
    has_states: bool = False
    # The token that stands for a part of an image in prompts; None: the model reads no images.
    image_place: int | None = None
    no_images_because: str = NO_IMAGES
    # Whether a step computes all tokens of an image that are not computed, because they see each other.
    whole_images: bool = False
    # Whether images are encoded beside steps, in parts, and requests wait for them: see `StepPlan.wanted_pictures`.
    encodes_beside: bool = False
    kv_tables: KVTables = ONE_TABLE
    speculates: bool = False  # whether steps compute drafts from texts, and so from predictions
    draft_lag: int = 0  # 1 if drafts are guessed from a token's hidden state and the token after it, otherwise 0


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """A snapshot of the engine: gauges, and counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0..1, share of the blocks that requests hold
    num_carried: int | None = None  # requests that the KV cache can hold (`Carried`); None: a whole batch, or unknown
    max_running: int | None = None  # requests that may run at once, limited by the objectives; None: no limit
    max_prompt_tokens: int | None = None  # prompt tokens in a step, limited by the objectives; None: no limit
    limit_reason: str | None = None  # reason for the limits: see `objectives.steering`; None: there are no objectives
    limit_moves: dict[str, int] = msgspec.field(default_factory=dict)  # by reason
    step_num_seqs: int = 0  # requests that took part in the newest step
    step_num_tokens: int = 0  # tokens of the newest step, padding included
    batch_cost: int = 0  # of the batch that closed last, in the task's unit
    batch_padding_share: float = 0.0  # of that cost, 0..1
    batch_wait_seconds: float = 0.0  # from the arrival of its first request until it closed
    busy_seconds: float = 0.0  # time of all steps since the start, without `unclaimed_seconds`
    unclaimed_seconds: float = 0.0  # of steps whose requests had all ended before the step
    # counters
    num_steps: int = 0
    num_batches: int = 0  # batches that closed
    num_preemptions: int = 0
    num_late: int = 0  # requests dropped before their first step because they could not meet their deadlines
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prompt_tokens: int = 0  # prompt tokens computed or found in the prefix cache
    prompt_tokens_cached: int = 0  # prompt tokens found in the prefix cache
    generation_tokens: int = 0
    num_drafts: int = 0  # how often a request computed drafts of its next tokens in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # draft tokens that the model sampled too
    padding_tokens: int = 0  # dummy tokens computed in static mode
    kv_live_token_steps: int = 0  # sum over steps of the tokens held in the KV cache
    kv_allocated_token_steps: int = 0  # sum over steps of the allocated token slots; waste = 1 - live / allocated
    batch_close_reasons: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # full, cost, window, eager, kv_blocks, drain

    @property
    def capacity(self) -> int | None:
        """Number of requests that can run at once if the KV cache or the objectives limit it; None: a full batch."""
        return min((each for each in (self.num_carried, self.max_running) if each is not None), default=None)
