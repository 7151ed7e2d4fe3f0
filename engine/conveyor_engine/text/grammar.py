"""Builds the grammars that restrict answers from the forms of requests.

llguidance compiles and follows them (docs/adr/0085). The workers of `serving.preparing` validate a grammar here.
`masks` compiles and follows it, in processes of their own. Does not use torch.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from conveyor_engine.errors import InvalidRequest, one_line
from conveyor_engine.text.lark_bounds import GrammarTooLarge, check_lark
from conveyor_engine.text.schemas import SchemaError, prepare_schema

Kind = Literal["json", "regex", "choice", "grammar", "lark"]

GRAMMAR_CHARACTERS_MAX = 256 * 1024
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


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the compiled grammar, or one with an error. It may take any time, and may end the process."""
    return LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=_limits())
