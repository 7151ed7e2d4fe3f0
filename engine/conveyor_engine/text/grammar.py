"""Grammars that restrict an answer. They are built from a request, compiled once, and followed token by token.

llguidance compiles and follows them (docs/adr/0085). The workers of `serving.preparing` validate a grammar here. The
engine process compiles it in parallel to its steps, and `scheduling` gets a mask before each token. Does not use torch.
"""

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from conveyor_engine.errors import InvalidRequest, one_line
from conveyor_engine.text.lark_bounds import GrammarTooLarge, check_lark
from conveyor_engine.text.schemas import SchemaError, prepare_schema
from conveyor_engine.wire.request import Thinking

Kind = Literal["json", "regex", "choice", "grammar", "lark"]

GRAMMAR_CHARACTERS_MAX = 256 * 1024
_CACHED = 64  # limit on the number of cached compiled grammars
_SILENT = 0
_LEXER_STATES_MAX = 20_000  # of one answer: each takes about a kilobyte
_STEP_ITEMS_MAX = 10_000  # parser states that one mask may create; 128 tools and 1,024 choices need 2,000
_MESSAGE_CHARACTERS_MAX = 300
# Limits white space between JSON tokens, because a model could otherwise write it without end.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "coerce_one_of": True, "lenient": False}


def build_grammar(kind: Kind, value: Any, param: str) -> str:
    """Build the grammar for a JSON schema, a regular expression, a list of texts or a grammar in Lark or GBNF.

    The kind `lark` is for grammars that the engine writes itself. Its value is a function that returns the text.

    param: the request's field with the value. Raises InvalidRequest if the value is invalid or too large.
    """
    try:
        grammar = _BUILDERS[kind](value)
    except (GrammarTooLarge, SchemaError) as error:
        raise _refusal(param, str(error)) from error
    except Exception as error:  # the conversion of a client's text may raise any error
        raise _refusal(param, f"{type(error).__name__}: {error}") from error
    if len(grammar) > GRAMMAR_CHARACTERS_MAX:
        raise _refusal(param, f"it has {len(grammar)} characters, more than {GRAMMAR_CHARACTERS_MAX}")
    if problem := LLMatcher.validate_grammar(grammar, limits=_limits()):
        raise _refusal(param, problem)
    return grammar


def _json(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(prepare_schema(schema), overrides=JSON_OPTIONS)


def _choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _lark(text: str) -> str:
    lark = any_to_lark(text)
    check_lark(lark)
    return LLMatcher.grammar_from_lark(lark)


_BUILDERS: dict[Kind, Callable[[Any], str]] = {
    "json": _json,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _lark,
    "lark": lambda build: LLMatcher.grammar_from_lark(build()),
}


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=_LEXER_STATES_MAX, step_max_items=_STEP_ITEMS_MAX)


def _refusal(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be followed: {one_line(problem)[:_MESSAGE_CHARACTERS_MAX]}", param=param)


class Grammars:
    """Compiles the grammars of a model's requests. Thread-safe."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """directory: the model's directory. The tokenizer is read when the first grammar is compiled."""
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._all = _mask_without((), vocab_size)
        self._all_but_ends = _mask_without(eos_token_ids, vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the most recently used last
        self._lock = Lock()

    def compile(self, grammar: str) -> None:
        """Compile the grammar, so that `follow` finds the result or the error in the cache."""
        with contextlib.suppress(InvalidRequest):  # `follow` raises it
            self._find(grammar)

    def follow(self, grammar: str, thinking: Thinking | None = None) -> "Answer | ThinkingFirst":
        """Return the state for an answer that has not begun.

        `grammar` may be empty if `thinking` is given. Raises InvalidRequest if this model cannot follow the grammar.
        """
        if thinking and not grammar:
            return ThinkingFirst(Free(self._all), thinking, self._all)
        compiled = self._find(grammar)
        if compiled.is_error():
            raise _refusal("structured output", compiled.get_error())
        answer = Answer(compiled, self._vocab_size)
        return ThinkingFirst(answer, thinking, self._all_but_ends) if thinking else answer

    def _find(self, grammar: str) -> LLMatcher:
        """Return the compiled grammar. A call does not wait for the compilation of another grammar."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        compiled = LLMatcher(self._read_tokenizer(), grammar, log_level=_SILENT, limits=_limits())
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(str(self._file), self._vocab_size, self._eos_token_ids or None)
            except Exception as error:  # a tokenizer.json may cause any error
                raise InvalidRequest(f"this model's tokenizer cannot follow structured output: {error}") from error
        return self._tokenizer


def _mask_without(token_ids: Sequence[int], vocab_size: int) -> bytes:
    mask = bytearray(b"\xff" * -(-vocab_size // 8))
    for token_id in token_ids:
        mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def _mask_of(token_id: int, num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


class ThinkingFirst:
    """An answer that follows its grammar after its thinking. A `Constraint`.

    Within the thinking all tokens are allowed. If there is a grammar, tokens that end the answer are excluded.
    Once the thinking has used up its budget, the next token must end the thinking.
    """

    def __init__(self, answer: "Answer | Free", thinking: Thinking, free: bytes) -> None:
        """free: the mask within the thinking, one bit for each token."""
        self._answer = answer
        self._thinking = thinking
        self._free = free
        self._end = _mask_of(thinking.end, len(free))
        self._num_thought = 0  # number of tokens in the thinking so far
        self._thinks = thinking.has_begun
        self._may_begin = not thinking.has_begun

    def accept(self, token_id: int) -> None:
        """Append a token to the answer. The mask must allow it."""
        if self._thinks:
            self._num_thought += 1
            self._thinks = token_id != self._thinking.end
        elif self._may_begin and token_id == self._thinking.begin:
            self._thinks = True
        else:
            self._answer.accept(token_id)
        self._may_begin = False

    @property
    def is_complete(self) -> bool:
        """Return whether only the end of the answer may follow."""
        return not self._thinks and self._answer.is_complete

    def build_mask(self) -> bytes:
        """Return the tokens that may come next, one bit each."""
        if self._thinks:
            budget = self._thinking.budget
            return self._end if budget is not None and self._num_thought >= budget else self._free
        mask = self._answer.build_mask()
        if not self._may_begin:
            return mask
        both = bytearray(mask)
        both[self._thinking.begin // 8] |= 1 << self._thinking.begin % 8
        return bytes(both)


class Free:
    """An answer without a grammar."""

    is_complete = False

    def __init__(self, everything: bytes) -> None:
        self._everything = everything

    def accept(self, token_id: int) -> None:
        """Accept any token."""

    def build_mask(self) -> bytes:
        """Return a mask that allows all tokens."""
        return self._everything


class Answer:
    """The state of one answer in its grammar. A `scheduling.request_state.Constraint`."""

    def __init__(self, compiled: LLMatcher, vocab_size: int) -> None:
        self._compiled = compiled
        self._nothing = bytes(-(-vocab_size // 8))
        self._matcher: LLMatcher | None = None  # copied at the first token, because many answers may wait

    @property
    def _own(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher

    def accept(self, token_id: int) -> None:
        """Append a token to the answer. The mask must allow it."""
        self._own.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Return whether only the end of the answer may follow."""
        return self._own.is_stopped() and not self._own.is_error()

    def build_mask(self) -> bytes:
        """Return the tokens that may come next, one bit each. If the grammar exceeds its limits, no token may."""
        mask = self._own.compute_bitmask()[: len(self._nothing)]
        return self._nothing if self._own.is_error() else mask
