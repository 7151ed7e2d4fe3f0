"""The name that a service wants at the gateway's root, and `keeper`'s answer. Pure."""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class RequestedName:
    """The served name that an InferenceService requests."""

    name: str
    created_unix: int
    is_ready: bool = False
    """Whether the service is Ready with its present spec."""


class NameState(Enum):
    """Who owns a served name, for a service that wants it."""

    PENDING = auto()
    """No namespace is known to own the name."""
    HELD = auto()
    """The service's namespace owns the name, and the name refers to the service."""
    SHARED = auto()
    """The service's namespace owns the name, but the name refers to an older service."""
    TAKEN = auto()
    """Another namespace owns the name."""
    TOO_MANY = auto()
    """No namespace owns the name, and the service's namespace is at its limit of names."""
    NOT_ALLOWED = auto()
    """The name has the form `namespace/name` of a service in another namespace."""


@dataclass(frozen=True, slots=True)
class NameAnswer:
    """The state of a service's name.

    `detail`: the API server's error for a pending claim, or the older service's name.
    """

    state: NameState = NameState.PENDING
    detail: str = ""
