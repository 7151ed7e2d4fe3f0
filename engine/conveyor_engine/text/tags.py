"""Structural tags: free text in which a part with a fixed syntax follows certain words, such as a tool's arguments.

`serving.preparing` reads them from a request. The syntax of the grammar is llguidance's dialect of Lark.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from conveyor_engine.text.json_grammar import JsonSchema

FindToken = Callable[[str], int | None]
_UNESCAPED_SLASH = re.compile(r"(?<!\\)/")
_MARK = re.compile(r"(<[/|｜]*[^\W\d][\w:▁]*[|｜]?>|｜\w+｜|\[[A-Z_]+\])")


class Tag(NamedTuple):
    """A part between two texts. Its content is JSON that fits a schema, or matches a regular expression."""

    begin: str
    schema: Any  # of the client, or a JsonSchema for `build_tag_grammar`; None: the content matches `regex`
    regex: str
    end: str


class Tags(NamedTuple):
    """The tags of a request.

    Each tag begins with a trigger. Once the answer contains a trigger, it must continue as one of the tags that begin
    with it. If `at_least_one`, the answer does not end without a tag; if `only_one`, it ends with its first tag.
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    only_one: bool = False


def quote(text: str, find_token: FindToken) -> str:
    """Return a text as Lark literals. A mark (`<name>`, `<|name|>`, `[NAME]`) that is one token becomes the token's id.

    Returns "" for an empty text, because Lark allows no empty literals.

    find_token: returns the token for a whole mark, or None. llguidance does not match such a token with a text literal.
    """
    parts = []
    for part in filter(None, _MARK.split(text)):
        token_id = find_token(part) if _MARK.fullmatch(part) else None
        parts.append(json.dumps(part) if token_id is None else f"<[{token_id}]>")
    return " ".join(parts)


def build_tag_grammar(tags: Tags, find_token: FindToken) -> str:
    """Return the grammar for an answer with these tags. Each schema is a JsonSchema."""
    lines = [r"TEXT: /(.|\n)*/"]
    for number, tag in enumerate(tags.tags):
        trigger = max((each for each in tags.triggers if tag.begin.startswith(each)), key=len)
        token_id = find_token(trigger) if _MARK.fullmatch(trigger) else None
        if token_id is None:  # the shortest text that ends with the trigger
            lines.append(f"head_{number}[lazy]: TEXT {json.dumps(trigger)}")
        else:
            lines.append(f"head_{number}: TEXT <[{token_id}]>")
        if isinstance(tag.schema, JsonSchema):
            content = f"%json {json.dumps(tag.schema.embedded())}"
        else:
            escaped = _UNESCAPED_SLASH.sub(r"\/", tag.regex)
            content = f"/{escaped}/"
        begin, end = quote(tag.begin.removeprefix(trigger), find_token), quote(tag.end, find_token)
        lines.append(f"tag_{number}: head_{number} {begin} {content} {end}")
    any_tag = " | ".join(f"tag_{number}" for number in range(len(tags.tags)))
    repeated = {(False, False): "tag* tail", (True, False): "tag+ tail", (False, True): "tag | tail"}
    start = repeated.get((tags.at_least_one, tags.only_one), "tag")
    return "\n".join([f"start: {start}", f"tag: {any_tag}", "tail: TEXT", *lines])
