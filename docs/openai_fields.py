"""Prints openai-fields.md, from the engine's own schemas and table: `python docs/openai_fields.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

from collections.abc import Iterator
from typing import Any

from conveyor_engine.serving.preparing.chat_schemas import ChatMessage, ChatRequest
from conveyor_engine.serving.preparing.comparing_schemas import RerankRequest, ScoreRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.fields import TABLE, Place
from conveyor_engine.serving.preparing.schemas import StreamOptions
from conveyor_engine.serving.preparing.tokens import TokenizeRequest
from conveyor_engine.tasks.classify.bodies import ClassificationRequest
from conveyor_engine.tasks.embed.bodies import EmbeddingRequest
from conveyor_engine.tasks.generate.preparing.messages_schemas import MessagesRequest
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest
from conveyor_engine.tasks.imagegenerate.bodies import ImageGenerationRequest

_HEAD = """\
# Fields of requests

Written by `make generate` from the table that the engine validates by; do not edit.

Null is the same as leaving a field out.

The engine ignores fields that are in none of these tables, as vLLM does. So it ignores misspelt names too.
`conveyor_engine_ignored_fields_total` counts these unknown fields of requests, and tools that are left out, by kind of
request.
Unknown fields of messages, content parts and `stream_options` are not counted.
The fields of forms and of pictures to classify, and most fields of text-embeddings-inference, are on the pages of the
tasks.
"""
_ACTING = {
    Place.CHAT: ChatRequest, Place.COMPLETIONS: CompletionRequest, Place.EMBEDDINGS: EmbeddingRequest,
    Place.RERANK: RerankRequest, Place.SCORE: ScoreRequest, Place.CLASSIFY: ClassificationRequest,
    Place.RESPONSES: ResponsesRequest, Place.MESSAGES: MessagesRequest,
    Place.TOKENIZE: TokenizeRequest, Place.STREAM_OPTIONS: StreamOptions,
    Place.MESSAGE: ChatMessage, Place.IMAGES: ImageGenerationRequest,
}  # fmt: skip
_HIGHEST = 2**31  # a bound from here on is that of a machine word


def acting() -> Iterator[str]:
    """The fields that do something, each once, by the places they stand in."""
    yield "## Fields with an effect"
    yield "Each heading names the requests that take the fields below it."
    seen: dict[tuple[str, str, str], list[Place]] = {}
    for place, schema in _ACTING.items():
        for name, field in schema.model_json_schema(mode="validation")["properties"].items():
            about = " ".join((schema.model_fields[name].description or "").split())
            seen.setdefault((name, values(field), about), []).append(place)
    rows: dict[tuple[Place, ...], list[str]] = {}
    for (name, allowed, about), places in seen.items():
        rows.setdefault(tuple(places), []).append(f"| `{name}` | {allowed} | {about} |")
    yield from tables("| field | values | meaning |", rows)


def tables(header: str, rows: dict[tuple[Place, ...], list[str]]) -> Iterator[str]:
    """A table for each set of places, under a heading that names them."""
    for places, lines in rows.items():
        words = ", ".join(places)
        yield from ("", f"### {words[0].upper()}{words[1:]}", header, "| --- " * (header.count("|") - 1) + "|", *lines)


def values(schema: dict[str, Any]) -> str:
    """The type and the bounds of one field, null aside."""
    (kind, *others) = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
    if others or "type" not in kind or kind["type"] in ("array", "object"):
        return ""
    if "enum" in kind:
        return " ".join(f"`{value}`" for value in kind["enum"])
    low = kind.get("minimum", kind.get("exclusiveMinimum"))
    high = kind.get("maximum", kind.get("exclusiveMaximum"))
    bounds = [f"{word} {bound:g}" for word, bound in ((_low_word(kind), low), ("to", high)) if _is_documented(bound)]
    return " ".join([kind["type"], *bounds])


def _low_word(schema: dict[str, Any]) -> str:
    return "above" if "exclusiveMinimum" in schema else "from"


def _is_documented(bound: float | None) -> bool:
    return bound is not None and abs(bound) < _HIGHEST


def ignored() -> Iterator[str]:
    yield "## Fields that cannot change the answer: ignored"
    yield "Any value is accepted. `conveyor_engine_ignored_fields_total` also counts the fields that ask for something"
    yield "in vain; they name the values that ask for nothing."
    yield ""
    groups: dict[tuple[str, tuple[Place, ...]], list[str]] = {}
    for row in TABLE:
        if row.why_ignored:
            nothing = f"; `{row.accepted_values()}` for nothing" if row.is_unmet else ""
            named = f"`{row.name}` ({', '.join(row.defined_by)}{nothing})"
            groups.setdefault((row.why_ignored, row.places), []).append(named)
    rows: dict[tuple[Place, ...], list[str]] = {}
    for (why, places), names in groups.items():
        rows.setdefault(places, []).append(f"| {', '.join(names)} | {why} |")
    yield from tables("| fields | each field |", rows)


def neutral() -> Iterator[str]:
    yield "## Fields that are not supported: accepted only with a value that has no effect"
    yield "Any other value gets 400 `unsupported_value` with the field's name."
    rows: dict[tuple[Place, ...], list[str]] = {}
    for row in TABLE:
        if not row.why_ignored:
            accepted = f"| `{row.name}` | {', '.join(row.defined_by)} | `{row.accepted_values()}` |"
            rows.setdefault(row.places, []).append(accepted)
    yield from tables("| field | defined by | accepted values |", rows)


if __name__ == "__main__":
    print("\n".join((_HEAD, *acting(), "", *ignored(), "", *neutral())))
