"""Grammars that are compiled and followed in the test's own process, by the same library."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from llguidance import LLMatcher, LLTokenizer

from conveyor_engine.masks.thinking import Free, ThinkingFirst, mask_without
from conveyor_engine.scheduling.constraint import Constraint
from conveyor_engine.text.grammar import compile_grammar
from conveyor_engine.wire.request import Thinking


class Answer(Constraint):
    """The state of one answer in its grammar."""

    def __init__(self, compiled: LLMatcher, mask_bytes: int) -> None:
        self._matcher, self._mask_bytes = compiled.deep_copy(), mask_bytes

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def build_mask(self) -> bytes:
        return self._matcher.compute_bitmask()[: self._mask_bytes]


class Grammars:
    """The grammars of one model."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._tokenizer = LLTokenizer(str(directory / "tokenizer.json"), vocab_size, list(eos_token_ids) or None)

    def follow(self, grammar: str, thinking: Thinking | None = None) -> Constraint:
        """Return the state of an answer that has not begun."""
        everything = mask_without((), self._vocab_size)
        answer: Constraint = Free(everything)
        if grammar:
            answer = Answer(compile_grammar(self._tokenizer, grammar), -(-self._vocab_size // 8))
            everything = mask_without(self._eos_token_ids, self._vocab_size)
        return ThinkingFirst(answer, thinking, everything) if thinking else answer


def answer_by_chance(
    grammars: Grammars, grammar: str, chance: Random, end_id: int, vocab_size: int, max_tokens: int
) -> list[int] | None:
    """Return the tokens of an answer that is chosen at random; None if it has not ended after `max_tokens`."""
    answer, tokens = grammars.follow(grammar), list[int]()
    while len(tokens) < max_tokens:
        if answer.is_complete:
            return tokens
        mask = answer.build_mask()
        allowed = [token_id for token_id in range(vocab_size) if mask[token_id // 8] >> token_id % 8 & 1]
        assert allowed, "something can always follow"
        if end_id in allowed and chance.random() < 0.5:
            return tokens
        token_id = chance.choice([each for each in allowed if each != end_id] or allowed)
        if token_id == end_id:
            return tokens
        answer.accept(token_id)
        tokens.append(token_id)
    return None
