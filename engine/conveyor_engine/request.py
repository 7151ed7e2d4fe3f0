"""What travels between the API process and the engine core: requests in, tokens out.

Built by `api/`, carried by `async_engine`, consumed and produced by `core`. Plain msgspec
structs, so the same objects cross the process boundary. Knows neither HTTP nor torch.
"""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended; every request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client left, or the server is going away
    DEADLINE = "deadline"  # the request's deadline passed
    ERROR = "error"  # the engine failed; `message` says why


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when to stop. Values are validated at the HTTP edge."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int | None = None  # fixes the random stream, keyed by (seed, position)
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # number of top log probabilities per token; 0 = only the chosen one


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `n > 1` is n of these, made at the edge."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    deadline: float | None = None  # time.monotonic() seconds (one clock on one host); None = none
    arrival_time: float = 0.0  # time.monotonic() seconds


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probability of the chosen token, and the top alternatives (ids and values, best first)."""

    token_id: int
    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, kw_only=True):
    """What one step gave one request. The last one of a request carries `finish_reason`."""

    request_id: str
    new_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
