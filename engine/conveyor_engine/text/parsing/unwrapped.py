"""Takes the text of a custom tool's call out of its arguments, `{"input": "..."}`, while they arrive.

Used by `build`.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Final

from conveyor_engine.text.parsing.interface import OutputParser, Part

_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The text up to the end of the string or to an escape that is not complete: a backslash, \\u12, or half of a pair.
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\[^u])*'
)


class Unwrapped:
    """Passes on the parts of another parser. Calls of some tools get their text in place of their arguments."""

    def __init__(self, parser: OutputParser, tools: Collection[str]) -> None:
        self._parser = parser
        self._tools = tools
        self._text: _Text | None = None  # of the last call, if its tool takes a text

    def feed(self, text: str) -> Sequence[Part]:
        return [each for part in self._parser.feed(text) for each in self._pass_on(part)]

    def finish(self) -> Sequence[Part]:
        return [*(each for part in self._parser.finish() for each in self._pass_on(part)), *self._end()]

    def _pass_on(self, part: Part) -> Sequence[Part]:
        field, text = part
        if field == "arguments" and self._text:
            return [("arguments", more)] if (more := self._text.feed(text)) else []
        ended = self._end()
        if field == "tool_call" and text in self._tools:
            self._text = _Text()
        return [*ended, part]

    def _end(self) -> Sequence[Part]:
        text, self._text = self._text, None
        return [("arguments", rest)] if text and (rest := text.finish()) else []


class _Text:
    """The text of one call. Arguments of another form are the text themselves, unchanged."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = self._has_ended = False

    def feed(self, text: str) -> str:
        """Return what is certain after more of the arguments."""
        self._held += text
        if not self._has_begun:
            if not (head := _HEAD.match(self._held)):
                return ""
            self._has_begun, self._held = True, self._held[head.end() :]
        if self._has_ended:
            return ""
        whole = _WHOLE.match(self._held)
        assert whole, "the pattern matches an empty text"
        self._held = self._held[whole.end() :]
        self._has_ended = self._held.startswith('"')
        return _decode(whole[0])

    def finish(self) -> str:
        """Return what was held back."""
        return "" if self._has_ended else self._held


def _decode(text: str) -> str:
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return text
    return decoded
