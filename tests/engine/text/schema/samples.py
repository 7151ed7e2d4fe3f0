"""Random answers to schemas, and what a validator says about them."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
from tests.engine.chat_model import VOCABULARY
from tests.engine.text.local_grammars import Grammars

from conveyor_engine.text.grammar import build_grammar
from conveyor_engine.text.tokenizer import Tokenizer

END_ID = 0
_ENDING_SHARE = 0.2  # of tokens that end something, if one is allowed


class Sampler:
    """Answers of a model that chooses tokens at random."""

    def __init__(self, directory: Path) -> None:
        self._grammars, self._tokenizer = Grammars(directory, VOCABULARY, [END_ID]), Tokenizer(directory)
        self._endings = {END_ID, *(token for text in '"]}' for token in self._tokenizer.encode(text, 9))}

    def may(self, schema: Any, texts: Sequence[str]) -> list[bool]:
        """Return whether each text may be a whole answer."""
        grammar = build_grammar("json", schema, "form").text
        return [self._follows(grammar, text) for text in texts]

    def _follows(self, grammar: str, text: str) -> bool:
        answer = self._grammars.follow(grammar)
        for token_id in [*self._tokenizer.encode(text, 1000), END_ID]:
            if not answer.build_mask()[token_id // 8] >> token_id % 8 & 1:
                return False
            answer.accept(token_id)
        return True

    def quote(self, text: str) -> str:
        """Return a text as JSON, in which letters are not escaped."""
        return json.dumps(text, ensure_ascii=False)

    def sample(self, schema: Any, seeds: int, tokens_max: int) -> list[Any]:
        """Return the answers that end."""
        grammar = build_grammar("json", schema, "form").text
        answers = [self._answer(grammar, Random(seed), tokens_max) for seed in range(seeds)]
        return [json.loads(self._tokenizer.decode(tokens)) for tokens in answers if tokens is not None]

    def _answer(self, grammar: str, chance: Random, tokens_max: int) -> list[int] | None:
        """Return the tokens of an answer, in which strings, lists and objects often end; None if it has not ended."""
        answer, tokens = self._grammars.follow(grammar), list[int]()
        while len(tokens) < tokens_max:
            if answer.is_complete:
                return tokens
            mask = answer.build_mask()
            allowed = [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]
            assert allowed, "something can always follow"
            ending = [token for token in allowed if token in self._endings] if chance.random() < _ENDING_SHARE else []
            token = chance.choice(ending or allowed)
            if token == END_ID:
                return tokens
            answer.accept(token)
            tokens.append(token)
        return None

    def check(self, schema: Any, seeds: int, tokens_max: int = 300) -> None:
        """Check that some answers end, and that all of them are valid."""
        assert self.count_valid(schema, seeds, tokens_max), "some answers end"

    def count_valid(self, schema: Any, seeds: int, tokens_max: int) -> int:
        """Check that all answers that end are valid. Returns their number."""
        ended = self.sample(schema, seeds, tokens_max)
        old = jsonschema.Draft201909Validator if is_old(schema) else jsonschema.Draft202012Validator
        for value in ended:
            jsonschema.validate(value, schema, cls=old, format_checker=old.FORMAT_CHECKER)
        return len(ended)


def is_old(schema: Any) -> bool:
    """Whether a schema has a list of `items`, as in drafts before 2020-12."""
    return isinstance(schema, dict) and isinstance(schema.get("items"), list)
