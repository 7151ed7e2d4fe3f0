"""Builds the grammars that restrict answers from the forms of requests.

llguidance compiles and follows them (docs/adr/0085). The workers of `serving.preparing` validate a grammar here.
`masks` compiles and follows it, in processes of their own. Does not use torch.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from conveyor_engine.errors import InvalidRequest, one_line
from conveyor_engine.text.json_grammar import JSON_OPTIONS, JsonSchema, limits, read_schema
from conveyor_engine.text.lark_bounds import GrammarTooLarge, check_lark
from conveyor_engine.text.schema.problems import Relaxed, SchemaError

Kind = Literal["json", "regex", "choice", "grammar", "lark"]

GRAMMAR_CHARACTERS_MAX = 256 * 1024
_SILENT = 0
_MESSAGE_CHARACTERS_MAX = 300


class BuiltGrammar(NamedTuple):
    """A grammar, and the keywords of the client's schemas that the answer might not follow."""

    text: str
    relaxed: Sequence[Relaxed] = ()


NO_GRAMMAR = BuiltGrammar("")


def build_grammar(kind: Kind, value: Any, param: str, *, strict: bool = False) -> BuiltGrammar:
    """Build the grammar for a JSON schema, a regular expression, a list of texts or a grammar in Lark or GBNF.

    The kind `lark` is for grammars that the engine writes itself. Its value is the text.

    param: the request's field with the value. strict: every keyword of a schema must be followed.
    Raises InvalidRequest if the value is invalid or too large.
    """
    if kind == "json":
        schema = follow_schema(value, param, strict=strict)
        grammar = LLMatcher.grammar_from_json_schema(schema.schema, overrides=JSON_OPTIONS)
        return BuiltGrammar(_limited(grammar, param), schema.relaxed)
    try:
        grammar = _BUILDERS[kind](value)
    except GrammarTooLarge as error:
        raise _refusal(param, str(error)) from error
    except Exception as error:  # the conversion of a client's text may raise any error
        raise _refusal(param, f"{type(error).__name__}: {error}") from error
    if kind == "lark":
        return BuiltGrammar(check_written(grammar, param))
    if problem := LLMatcher.validate_grammar(_limited(grammar, param), limits=limits()):
        raise _refusal(param, problem)
    return BuiltGrammar(grammar)


def check_written(grammar: str, param: str) -> str:
    """Return a grammar that the engine wrote itself. Raises InvalidRequest if it is too large or too complex."""
    if LLMatcher.validate_grammar(_limited(grammar, param), limits=limits()):
        raise _refusal(param, "it is too complex for the engine")
    return grammar


def follow_schema(schema: Any, param: str, *, strict: bool = False) -> JsonSchema:
    """Return a client's JSON schema as the library follows it. Raises InvalidRequest with the keyword and its place."""
    try:
        return read_schema(schema, strict=strict)
    except SchemaError as error:
        raise _refusal(param, str(error)) from error


def _limited(grammar: str, param: str) -> str:
    if len(grammar) > GRAMMAR_CHARACTERS_MAX:
        raise _refusal(param, f"it has {len(grammar)} characters, more than {GRAMMAR_CHARACTERS_MAX}")
    return grammar


def _choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _lark(text: str) -> str:
    lark = any_to_lark(text)
    check_lark(lark)
    return LLMatcher.grammar_from_lark(lark)


_BUILDERS: dict[Kind, Callable[[Any], str]] = {
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _lark,
    "lark": LLMatcher.grammar_from_lark,
}


def _refusal(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be followed: {one_line(problem)[:_MESSAGE_CHARACTERS_MAX]}", param=param)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the compiled grammar, or one with an error. It may take any time, and may end the process."""
    return LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=limits())
