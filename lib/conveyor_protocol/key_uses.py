"""How the keys of APIKeys were used. Gateways report it, and the operator writes it into the status of APIKeys."""

from typing import Annotated, Final

from msgspec import Meta, Struct

MAX_CHANGES: Final = 20  # on a page
Day = Annotated[str, Meta(pattern="^([0-9]{4}-[0-9]{2}-[0-9]{2})?$")]  # in UTC; empty: never


class KeyUse(Struct, frozen=True, array_like=True):
    """The last uses of one APIKey at one gateway."""

    namespace: Annotated[str, Meta(max_length=63)]
    name: Annotated[str, Meta(max_length=253)]
    used: Day = ""
    """The last day on which a request proved to have one of its keys."""
    rejected: Day = ""
    """The last day on which a request with one of its keys was rejected."""
    reason: Annotated[str, Meta(pattern="^[A-Za-z]{0,32}$")] = ""
    """Why the first request of that day was rejected."""


class KeyUses(Struct, frozen=True):
    """`GET /keys?after=<cursor>`: the next changes after those of the page with this cursor, in turns of namespaces.

    The oldest change of a namespace comes first. At most MAX_CHANGES; an unknown cursor begins from the start. An
    APIKey changes at most twice a day.
    """

    cursor: Annotated[str, Meta(max_length=64)]
    keys: Annotated[list[KeyUse], Meta(max_length=MAX_CHANGES)]
