"""The seam between a choice's text and the fields of a message: text in, parts out.

A format builds one parser for each choice, and `choice` feeds it. Today every answer is one field, `PLAIN_TEXT`. Knows
neither tokens nor JSON.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

Field = Literal["content"]
"""The fields of an answer that have text, by their names in the API."""


Part = tuple[Field, str]
"""More text of one field. A plain tuple, because each token of a stream makes one."""


class OutputParser(Protocol):
    """The parser of one choice.

    Invariant: the text of each field, joined over all parts, is the same for any division of the input into chunks. So
    a parser holds back text that could be the beginning of a mark, and nothing else.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain after this text, which is not empty."""
        ...

    def finish(self) -> Sequence[Part]:
        """What is held back, once no more text comes. Called once, for every choice that does not fail."""
        ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> Sequence[Part]:
        return (("content", text),)

    def finish(self) -> Sequence[Part]:
        return ()


PLAIN_TEXT = PlainText()  # it keeps nothing, so all choices share it
