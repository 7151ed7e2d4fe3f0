"""One step as plain data: what the device is to compute, and what came of it.

Plans are made by `scheduling`, carried by `loop`, and run by whatever stands behind `loop.executor`; results go the
other way. Everything is a number, addressed by row: a row is a place in the state arrays of the executor (tokens,
block table, sampling parameters), which knows no requests. So both can be sent to another process.
"""

from array import array
from collections.abc import Sequence
from typing import Self

import msgspec

from conveyor_engine.wire.request import SamplingParams, TokenLogprobs


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How a row's tokens are chosen."""

    params: SamplingParams
    seed: int  # 64 bits; the random numbers are keyed by it and the token's position
    min_length: int = 0  # tokens, the prompt's included, that the row must have before ...
    stop_ids: tuple[int, ...] = ()  # ... one of these may be chosen; none where nothing is forbidden


class AdmittedRow(msgspec.Struct, frozen=True, array_like=True):
    """All there is to know of a row, in place of what it held before."""

    row: int
    packed_token_ids: bytes  # uint32 each
    block_ids: list[int]
    sampling: RowSampling | None  # None: no tokens are sampled
    payload: bytes = b""  # of the request

    @classmethod
    def of(
        cls,
        row: int,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        sampling: RowSampling | None,
        payload: bytes = b"",
    ) -> Self:
        """Copies both lists."""
        return cls(row, array("I", token_ids).tobytes(), list(block_ids), sampling, payload)

    @property
    def token_ids(self) -> "array[int]":
        """All tokens of the row."""
        return array("I", self.packed_token_ids)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: first the changes since the last step, then the rows that take part, decodes first.

    Row `rows[i]` computes `num_tokens[i]` tokens from position `num_computed_tokens[i]` on, and samples after each of
    the last `num_logits[i]` of them: after none while its prompt goes on, after one else, after several only where the
    executor verifies drafts. It writes what it samples into the row itself: the next plan may compute those tokens
    before anybody else has seen them. Where the task takes one step, each row is a whole request that is admitted in
    this plan, and nothing is sampled: its one output is a payload.
    """

    number: int  # the result bears it too
    admitted: list[AdmittedRow]
    new_blocks: list[tuple[int, list[int]]]  # (row, blocks at the end of its table)
    rows: list[int]
    num_computed_tokens: list[int]
    num_tokens: list[int]
    num_logits: list[int]
    num_decodes: int  # of the rows: these compute one token each


class RowMask(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a row may sample in a step. It depends on tokens before it, so it comes after the plan."""

    row: int
    allowed: bytes  # a bit for each token of the vocabulary, the lowest bit of the first byte first


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of a step: an entry for each row with logits, in the plan's order.

    A row gets 0 to `num_logits` tokens. Token -1: the logits were not finite. Where the task takes one step, it gets no
    tokens but a payload, which its task reads; an empty one was not finite.
    """

    number: int
    token_ids: list[list[int]]
    logprobs: Sequence[Sequence[TokenLogprobs] | None] | None = None
    payloads: list[bytes] | None = None
