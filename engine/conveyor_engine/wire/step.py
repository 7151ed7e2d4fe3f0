"""Plan and result of one step, as plain data.

`scheduling` creates plans, `loop` passes them on, and the implementation of `loop.executor` runs them. Results go the
other way. They contain numbers and bytes, addressed by row. A row is a place in the executor's state arrays (tokens,
block table, sampling parameters); the executor knows no requests. So plans and results can be sent to another process.
"""

from array import array
from collections.abc import Sequence
from typing import Self

import msgspec

from conveyor_engine.wire.request import SamplingParams, TokenLogprobs

NOTHING_ALLOWED = -2
READ_TOKENS = 256  # tokens that the draft model reads before a step at most, in one forward
NUM_AHEAD = 1  # steps that are begun in addition to the one whose result is awaited; one keeps a device busy


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How a row's tokens are chosen."""

    params: SamplingParams
    seed: int  # 64 bits; the random numbers are keyed by it and the token's position
    min_length: int = 0  # number of tokens, prompt included, that the row needs before it may sample `stop_ids`
    stop_ids: tuple[int, ...] = ()  # tokens that the row may not sample before `min_length`; empty: no restriction
    num_prompt_tokens: int = 0


class AdmittedRow(msgspec.Struct, frozen=True, array_like=True):
    """The new state of a row. It replaces the row's former state."""

    row: int
    packed_token_ids: bytes  # uint32 each
    block_ids: list[int]  # of the full tables (`KVTables`): those of all tables for the first tokens, and so on
    sampling: RowSampling | None  # None: no tokens are sampled
    payload: bytes = b""  # of the request
    adapter: int = 0  # its number in the setting `adapters`, from 1; 0: the model without an adapter
    window_blocks: list[int] = []  # of the windowed tables (`KVTables`), from index `window_first` on
    window_first: int = 0

    @classmethod
    def of(
        cls,
        row: int,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        sampling: RowSampling | None,
        payload: bytes = b"",
        adapter: int = 0,
        window_blocks: Sequence[int] = (),
        window_first: int = 0,
    ) -> Self:
        """Make the new state of a row. Copies the lists."""
        packed = array("I", token_ids).tobytes()
        return cls(row, packed, list(block_ids), sampling, payload, adapter, list(window_blocks), window_first)

    @property
    def token_ids(self) -> "array[int]":
        """Return the tokens of the row."""
        return array("I", self.packed_token_ids)


class WantedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture for whose features a request waits."""

    digest: bytes
    num_tokens: int  # between its first and its last one: at least as many as its features
    payload: bytes  # of the request


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: first the changes since the last step, then the rows that take part, decodes first.

    Row `rows[i]` computes `num_tokens[i]` tokens from position `num_computed_tokens[i]` on, and logits after each of
    the last `num_logits[i]` of them. `num_logits[i]` is 0 while the prompt is still being prefilled, otherwise 1. It
    is larger if log probabilities of the prompt were requested. The result then has these, and a token only after the
    last prompt token. It is also larger for rows with drafts: see `drafts`. The executor stores sampled tokens in the
    row, so the next plan may compute them before any other process has seen them. If the task takes one step, each
    row is a whole request that this plan admits. Nothing is sampled, and the row's only output is a payload.
    """

    number: int  # repeated in the result
    admitted: list[AdmittedRow]
    new_blocks: list[tuple[int, list[int]]]  # (row, blocks that are appended to its table)
    rows: list[int]
    num_computed_tokens: list[int]
    num_tokens: list[int]
    num_logits: list[int]
    num_decodes: int  # number of decodes: the first rows, which compute one token each
    # (row, index, blocks): the blocks of the windowed tables from this index on
    new_window_blocks: list[tuple[int, int, list[int]]] = []
    # What to encode beside the step, a part of it in each step, first to last. The step may have no rows then.
    wanted_pictures: list[WantedPicture] = []
    # Beside wanted pictures: digests of reported ones that rows still need, so that no other may take their place.
    held_pictures: list[bytes] = []
    images_first: bool = False  # whether wanted pictures get most of the time, not a share that decodes hardly notice
    # Of the rows after the decodes: guesses of the tokens after the row's next one, which it computes too. The result
    # has the sampled tokens up to the first that differs from its draft, or one more than the drafts.
    drafts: list[list[int]] = []
    # (row, first, number): tokens that the draft model reads before the step, rows with one token first. Then it
    # guesses the drafts of these rows, which are zeros in `drafts`. A row without drafts has more tokens to read.
    readings: list[tuple[int, int, int]] = []


class RowMask(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a row may sample in a step. It is sent after the plan, because it depends on earlier tokens."""

    row: int
    allowed: bytes  # a bit for each token of the vocabulary, the lowest bit of the first byte first


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step: an entry for each row with logits, in the plan's order.

    A row gets one token, or several if it has drafts, and before it the log probabilities of prompt tokens. It gets
    no token if the step does not compute its last prompt token. Token -1 means that the logits were not finite, and
    `NOTHING_ALLOWED` that the parameters forbid all tokens. If the task takes one step, the row gets a payload
    instead of tokens, which the task reads. An empty payload means a result that was not finite.
    A task with tokens may add a payload for each row of the plan. It is empty for rows that have none.
    """

    number: int
    token_ids: list[list[int]]
    logprobs: Sequence[Sequence[TokenLogprobs] | None] | None = None
    payloads: list[bytes] | None = None
    encoded: list[bytes] = []  # digests of the wanted pictures that are encoded now
    forwards: list[tuple[int, int, float]] = []  # of the draft model before the step: (rows, tokens, seconds)
