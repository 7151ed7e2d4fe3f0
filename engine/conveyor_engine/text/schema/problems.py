"""What can be wrong with a schema. Used by all modules of `text.schema`, and where answers and errors are written."""

from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

_NAMED_MAX: Final = 8  # keywords in a header
_POINTER_CHARACTERS_MAX: Final = 200


class SchemaError(Exception):
    """The engine cannot follow the schema. The message names the keyword and its place."""

    def __init__(self, why: str, pointer: str, keyword: str = "") -> None:
        place = f"{keyword} at {shorten(pointer)}" if keyword else f"at {shorten(pointer)}"
        super().__init__(f"{place}: {why}")


class NoValueFits(SchemaError):
    """No value fits the schema."""

    def __init__(self, pointer: str, keyword: str = "", why: str = "no value fits") -> None:
        super().__init__(why, pointer, keyword)


class Relaxed(NamedTuple):
    """A keyword that the answer might not follow, and the JSON pointer of the schema with this keyword."""

    keyword: str
    pointer: str


def shorten(pointer: str) -> str:
    """Return a JSON pointer for a message."""
    most = _POINTER_CHARACTERS_MAX
    return pointer if len(pointer) <= most else f"{pointer[: most // 2]}...{pointer[-most // 2 :]}"


def describe_relaxed(relaxed: Sequence[Relaxed]) -> str:
    """Return the value of the header `Warning`, in the form that Kubernetes uses too. It is ASCII."""
    named = [f"{keyword} at {quote(shorten(pointer), safe='#/$')}" for keyword, pointer in relaxed[:_NAMED_MAX]]
    more = f" and {len(relaxed) - _NAMED_MAX} more" if len(relaxed) > _NAMED_MAX else ""
    return f'299 - "the answer might not follow these keywords of the JSON schema: {", ".join(named)}{more}"'
