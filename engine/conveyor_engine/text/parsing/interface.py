"""The seam between a choice's text and the fields of a message: text in, parts out.

A format builds one parser for each choice, and `serving.http.choice` feeds it. Knows neither tokens nor the API's JSON.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

Field = Literal["content", "reasoning", "tool_call", "arguments"]
"""What a part is. `tool_call` begins a call, and its text is the whole name of the tool; `arguments` belong to the
last call."""


Part = tuple[Field, str]
"""More text of one field. A plain tuple, because each token of a stream makes one."""


class OutputParser(Protocol):
    """The parser of one choice.

    Invariant: the parts, with neighbours of one field joined, are the same for any division of the input into chunks.
    So a parser holds back text that could be the beginning of a mark, and nothing else.
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
