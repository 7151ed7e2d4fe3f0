"""Finds the tokens that belong to a message's content, for formats that show log probabilities with each part.

Used by `choice`. The other tokens of an answer belong to thinking, to tool calls and to the marks around them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from conveyor_engine.text.parsing.interface import Part
from conveyor_engine.wire.request import TokenLogprobs

_HELD_CHARACTERS_MAX: Final = 1024  # more than a parser ever holds back, which is a mark and the name in it


class Token(NamedTuple):
    """A token's log probabilities, and its start in the choice's text (in characters).

    An end token has log probabilities too, although its text is not shown.
    """

    logprobs: TokenLogprobs
    start: int


class ContentTokens:
    """The newest tokens of one choice, with their text, as long as they may still turn out to be content."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._text, self._begin = "", 0  # `_begin`: the start of `_text` in the choice's text, in characters
        self._known = 0  # the end of the last part that was found, in the choice's text
        self._is_behind = False  # a later part was not found, because the parser has changed its text

    def take(self, parts: Sequence[Part], tokens: Sequence[Token], text: str) -> list[Token]:
        """Return the tokens of the content in `parts`.

        tokens, text: all that the model has generated since the last call; `text` includes the marks.

        The content of a part may be older than `text`, because a parser holds text back until it is certain.
        """
        self._tokens += tokens
        self._text += text
        found: list[Token] = []
        for name, part in parts:
            at = self._find(part)
            if at >= 0 and name == "content":
                found += self._take_content(at, len(part))
        if parts and len(self._text) > _HELD_CHARACTERS_MAX:  # text that is not content, such as a tool call
            self._drop(len(self._text) - _HELD_CHARACTERS_MAX)
        return found

    def _find(self, part: str) -> int:
        """Return where the part begins in the text, behind the part before it; -1 if it does not."""
        start = max(0, self._known - self._begin)
        at = self._text.rfind(part, start) if self._is_behind else self._text.find(part, start)
        self._is_behind = at < 0
        if at >= 0:
            self._known = self._begin + at + len(part)
        return at

    def _take_content(self, at: int, length: int) -> list[Token]:
        begin, end = self._begin + at, self._begin + at + length
        ends = [*(token.start for token in self._tokens[1:]), self._begin + len(self._text)]
        found = [
            token
            for token, its_end in zip(self._tokens, ends, strict=False)
            if token.start < end and max(token.start, its_end - 1) >= begin
        ]
        self._drop(at + length)
        return found

    def _drop(self, num_characters: int) -> None:
        """Drop the first characters, and the tokens that begin in them."""
        self._text = self._text[num_characters:]
        self._begin += num_characters
        self._tokens = [token for token in self._tokens if token.start >= self._begin]
