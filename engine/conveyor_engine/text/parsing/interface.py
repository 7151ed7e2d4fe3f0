"""The interface of parsers, which divide a choice's text into the fields of a message: text in, parts out.

`build` makes one parser for each choice, and the task that generates text feeds it. Parsers know neither tokens nor the
API's JSON.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

Field = Literal["content", "reasoning", "tool_call", "arguments"]
"""The field of a part.

`tool_call` begins a call, and its text is the tool's whole name. `arguments` belong to the last call.
"""

CallIds = Literal["random", "short", "numbered"]
"""`short`: nine letters and digits, as Mistral's templates require. `numbered`: `functions.name:3`, as Kimi writes."""

Part = tuple[Field, str]
"""More text of one field. A plain tuple, because each token of a stream creates one."""


class OutputParser(Protocol):
    """The parser of one choice.

    Invariant: the parts, with neighbours of one field joined, are the same for any division of the input into chunks.
    So a parser holds back text that could be the beginning of a mark, and nothing else.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """Return the parts that are certain after this text, which must not be empty."""
        ...

    def finish(self) -> Sequence[Part]:
        """Return the parts that were held back. Called once at the end of every choice that does not fail."""
        ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> Sequence[Part]:
        return (("content", text),)

    def finish(self) -> Sequence[Part]:
        return ()


PLAIN_TEXT = PlainText()  # has no state, so all choices share it
