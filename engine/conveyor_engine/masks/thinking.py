"""The thinking before an answer: a constraint that needs no grammar, or that precedes one."""

from collections.abc import Sequence

from conveyor_engine.scheduling.constraint import Constraint
from conveyor_engine.wire.request import Thinking


def mask_without(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Return a mask that allows all tokens but these."""
    mask = bytearray(b"\xff" * -(-vocab_size // 8))
    for token_id in token_ids:
        mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def _mask_of(token_id: int, num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


class ThinkingFirst(Constraint):
    """An answer that follows its grammar after its thinking.

    Within the thinking all tokens are allowed. If there is a grammar, tokens that end the answer are excluded.
    Once the thinking has used up its budget, the next token must end the thinking.
    """

    def __init__(self, answer: Constraint, thinking: Thinking, free: bytes) -> None:
        """free: the mask within the thinking, one bit for each token."""
        self._answer = answer
        self._thinking = thinking
        self._free = free
        self._end = _mask_of(thinking.end, len(free))
        self._num_thought = 0  # number of tokens in the thinking so far
        self._thinks = thinking.has_begun
        self._may_begin = not thinking.has_begun

    def open(self) -> None:
        self._answer.open()

    def close(self) -> None:
        self._answer.close()

    def accept(self, token_id: int) -> None:
        if self._thinks:
            self._num_thought += 1
            self._thinks = token_id != self._thinking.end
        elif self._may_begin and token_id == self._thinking.begin:
            self._thinks = True
        else:
            self._answer.accept(token_id)
        self._may_begin = False

    @property
    def is_ready(self) -> bool:
        return self._thinks or self._answer.is_ready

    @property
    def failure(self) -> tuple[str, bool] | None:
        return self._answer.failure

    @property
    def is_complete(self) -> bool:
        return not self._thinks and self._answer.is_complete

    def build_mask(self) -> bytes:
        if self._thinks:
            budget = self._thinking.budget
            return self._end if budget is not None and self._num_thought >= budget else self._free
        mask = self._answer.build_mask()
        if not self._may_begin:
            return mask
        both = bytearray(mask)
        both[self._thinking.begin // 8] |= 1 << self._thinking.begin % 8
        return bytes(both)


class Free(Constraint):
    """An answer without a grammar."""

    is_complete = False

    def __init__(self, everything: bytes) -> None:
        self._everything = everything

    def accept(self, token_id: int) -> None:
        pass

    def build_mask(self) -> bytes:
        return self._everything
