"""A fake model's next tokens, and constraints of them whose masks may come late. Without torch."""

import zlib
from collections.abc import Callable, Collection

from tests.engine.builders import VOCAB_SIZE

from conveyor_engine.scheduling.constraint import Constraint


def next_token(token_ids: list[int]) -> int:
    """Return the fake model's next token. It depends on all of these tokens and is never EOS."""
    return 10 + zlib.crc32(repr(token_ids).encode()) % (VOCAB_SIZE - 10)


class SumModThree(Constraint):
    """A constraint: the next token and the sum of the answer's earlier tokens are equal modulo three."""

    num_tokens = VOCAB_SIZE

    def __init__(self) -> None:
        self._sum = 0

    def accept(self, token_id: int) -> None:
        assert is_allowed(self.build_mask(), token_id), "only an allowed token is given"
        self._sum += token_id

    @property
    def is_complete(self) -> bool:
        return False

    def build_mask(self) -> bytes:
        bits = sum(1 << token_id for token_id in range(self._sum % 3, self.num_tokens, 3))
        return bits.to_bytes(-(-self.num_tokens // 8), "little")


class PretendedMasks:
    """Builds masks as slowly as its constraints want. Time passes with `tick`, and a little with `wait`."""

    def __init__(self) -> None:
        self.opened: list[TardySumModThree] = []
        self.on_ready: Callable[[], None] = lambda: None
        self._loop_sleeps = False

    def tick(self) -> None:
        """Let time pass."""
        self._pass([each for each in self.opened if each.delay])

    def flush(self) -> None:
        pass

    def wait(self, constraints: Collection[Constraint], seconds: float) -> None:
        self._pass([each for each in self.opened if each in constraints and each.delay == 1])

    def sleep(self) -> None:
        self._loop_sleeps = True

    def _pass(self, waiting: list["TardySumModThree"]) -> None:
        for each in waiting:
            each.delay -= 1
        if self._loop_sleeps and any(not each.delay for each in waiting):
            self._loop_sleeps = False
            self.on_ready()


class TardySumModThree(SumModThree):
    """The same, but the mask after a token is ready only after some time, and the answer ends after some tokens."""

    def __init__(self, masks: PretendedMasks, delays: list[int], ends_after: int) -> None:
        super().__init__()
        self._masks, self._delays, self._ends_after = masks, delays, ends_after
        self._num_tokens = 0
        self.delay = delays[0]

    def open(self) -> None:
        self._start()
        self._masks.opened.append(self)

    def close(self) -> None:
        self._masks.opened.remove(self)

    def accept(self, token_id: int) -> None:
        assert is_allowed(SumModThree.build_mask(self), token_id), "only an allowed token is given"
        self._sum += token_id
        self._num_tokens += 1
        self._start()

    def _start(self) -> None:
        self.delay = self._delays[self._num_tokens % len(self._delays)]

    @property
    def is_ready(self) -> bool:
        return not self.delay

    @property
    def is_complete(self) -> bool:
        assert self.is_ready
        return self._num_tokens >= self._ends_after

    def build_mask(self) -> bytes:
        assert self.is_ready
        return super().build_mask()


def is_allowed(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def next_allowed(token_ids: list[int], mask: bytes | None) -> int:
    """Return `next_token`, or the first token after it that the mask allows."""
    token_id = next_token(token_ids)
    while mask is not None and not is_allowed(mask, token_id):
        token_id = 10 + (token_id - 9) % (VOCAB_SIZE - 10)
    return token_id
