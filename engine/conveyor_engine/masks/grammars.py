"""The constraints of requests, by their grammar and their thinking. Used by `loop.process`."""

from collections.abc import Sequence

from conveyor_engine.masks.client import Masks
from conveyor_engine.masks.thinking import Free, ThinkingFirst, mask_without
from conveyor_engine.masks.verdicts import Verdict
from conveyor_engine.scheduling.constraint import Constraint
from conveyor_engine.wire.request import EngineRequest


class Grammars:
    """Builds constraints. The processes for grammars start with the first grammar."""

    def __init__(self, masks: Masks, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.masks = masks
        self._all = mask_without((), vocab_size)
        self._all_but_ends = mask_without(eos_token_ids, vocab_size)

    def judge(self, key: bytes, grammar: str) -> Verdict | None:
        """Return whether the grammar may be followed; None if that is not known yet: see `Masks.judge`."""
        return self.masks.judge(key, grammar)

    def cancel(self, key: bytes) -> None:
        """Stop compiling this grammar, because no request waits for it any more."""
        self.masks.cancel(key)

    def constrain(self, request: EngineRequest) -> Constraint | None:
        """Return the request's constraint; None if it has none. Its grammar must have been judged."""
        if not request.grammar:
            return ThinkingFirst(Free(self._all), request.thinking, self._all) if request.thinking else None
        answer = self.masks.follow(request.grammar)
        return ThinkingFirst(answer, request.thinking, self._all_but_ends) if request.thinking else answer
