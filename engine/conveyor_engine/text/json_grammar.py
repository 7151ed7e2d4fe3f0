"""Builds grammars from JSON schemas. `text.schema` rewrites a schema, and llguidance reads the result.

No message of the library reaches a client: an error names a keyword of the client's schema, and its place.
Used by `grammar`, and by `tags` and `parsing.formats`, which write schemas into larger grammars.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits

from conveyor_engine.text.schema.prepare import Prepared, prepare
from conveyor_engine.text.schema.problems import NoValueFits, Relaxed, SchemaError
from conveyor_engine.text.schema.prune import within

LEXER_STATES_MAX: Final = 20_000  # of one answer: each takes about a kilobyte
STEP_ITEMS_MAX: Final = 10_000  # parser states that one mask may create; 128 tools and 1,024 choices need 2,000
# Limits white space between JSON tokens, because a model could otherwise write it without end.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "coerce_one_of": True, "lenient": False}
_SEARCH_SECONDS: Final = 0.4  # of processor time, for the place of an error
_RELAXED_MAX: Final = 8  # keywords that are relaxed because the library refuses them
_KEPT: Final = ("type", "$defs", "$ref", "properties", "items", "prefixItems", "anyOf", "required")  # never relaxed


class JsonSchema(NamedTuple):
    """A schema that the library follows, and the keywords that an answer might not follow."""

    schema: Any
    relaxed: Sequence[Relaxed]

    def embedded(self) -> dict[str, Any]:
        """Return the schema with the library's options, for a larger grammar. true and false are schemas too."""
        schema = self.schema if isinstance(self.schema, dict) else {}
        return {**schema, "x-guidance": JSON_OPTIONS}


def limits() -> LLParserLimits:
    """Return the library's limits for one grammar."""
    return LLParserLimits(max_lexer_states=LEXER_STATES_MAX, step_max_items=STEP_ITEMS_MAX)


def read_schema(schema: Any, *, strict: bool = False) -> JsonSchema:
    """Return a client's schema as the library follows it. Raises SchemaError if it is wrong or no value fits it.

    strict: raise SchemaError also if the answer might not follow a keyword.
    """
    try:
        prepared = _follow(prepare(schema, _are_disjoint))
    except NoValueFits:  # perhaps one with properties that the schema does not name
        prepared = _follow(prepare(schema, _are_disjoint, closed=False))
    if strict and prepared.relaxed:
        keyword, pointer = prepared.relaxed[0]
        raise SchemaError("the engine cannot guarantee it, as `strict: true` requires", pointer, keyword)
    return JsonSchema(prepared.schema, prepared.relaxed)


def _follow(prepared: Prepared) -> Prepared:
    """Relax what the library refuses. Raises SchemaError."""
    for _ in range(_RELAXED_MAX):
        if not (problem := _validate(prepared.schema)):
            return prepared
        _relax(prepared, problem)
    raise SchemaError("the schema is too complex for the engine", "#")


def _validate(schema: Any) -> str:
    """Return the library's problem with a schema; empty if there is none."""
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    return str(LLMatcher.validate_grammar(grammar, limits=limits()) or "")


def _are_disjoint(patterns: Sequence[str]) -> bool:
    return not _validate({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})


def _relax(prepared: Prepared, problem: str) -> None:
    """Remove the keyword that the library refuses. Raises SchemaError if there is none to remove."""
    definitions: Mapping[str, Any] = prepared.schema.get("$defs", {})
    deadline = time.thread_time() + _SEARCH_SECONDS
    schema, pointer = _find_cause(prepared, definitions, deadline)
    if "nsatisfiable" in problem:
        raise NoValueFits(pointer)
    for part, name in _list_removable(schema):
        if time.thread_time() > deadline:
            break
        whole = dict(part)
        del part[name]
        if not _validate({**schema, "$defs": definitions}):
            prepared.relax(name, prepared.place_of(part, pointer))
            return
        part.clear()
        part.update(whole)  # in the same order
    raise SchemaError("the engine cannot follow this combination of keywords", pointer)


def _list_removable(schema: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the keywords that may be relaxed, each with the schema that has it. Lists of schemas come last."""
    found: list[tuple[dict[str, Any], str]] = []
    waiting = [schema]
    while waiting:
        part = waiting.pop(0)
        found += [(part, name) for name in part if name not in _KEPT]
        waiting += [each for name in ("allOf", "anyOf") for each in part.get(name, ()) if isinstance(each, dict)]
    return sorted(found, key=lambda each: each[1] == "allOf")


def _find_cause(prepared: Prepared, definitions: Mapping[str, Any], deadline: float) -> tuple[dict[str, Any], str]:
    """Return the innermost schema that the library refuses, and the place of the client's schema that it comes from."""
    schema, pointer = prepared.schema, "#"
    seen = set[str]()

    def find(parent: dict[str, Any]) -> Iterator[dict[str, Any]]:
        reference = parent.get("$ref")
        if reference is not None and reference not in seen:
            seen.add(reference)
            yield definitions[reference.rsplit("/", 1)[1]]
        yield from (each for each in within(parent) if isinstance(each, dict))

    while time.thread_time() < deadline:
        inner = next((each for each in find(schema) if _validate({**each, "$defs": definitions})), None)
        if inner is None:
            break
        schema, pointer = inner, prepared.place_of(inner, pointer)
    return schema, pointer
