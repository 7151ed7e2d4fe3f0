"""What a service wants to be called at the gateway's root, and what `keeper` says about that. Pure."""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one InferenceService."""

    name: str
    created_unix: int


class NameState(Enum):
    """To whom a served name belongs."""

    PENDING = auto()
    """To nobody, so far as is known."""
    HELD = auto()
    """To the service's namespace, and it leads to the service."""
    SHARED = auto()
    """To the service's namespace, and it leads to an older service."""
    TAKEN = auto()
    """To another namespace."""
    TOO_MANY = auto()
    """To nobody, and the service's namespace has as many as it may."""
    NOT_ALLOWED = auto()
    """It may be the `namespace/name` of another namespace's service."""


@dataclass(frozen=True, slots=True)
class NameAnswer:
    """`detail` is the API server's refusal of a pending claim, or the name of the older service."""

    state: NameState = NameState.PENDING
    detail: str = ""
