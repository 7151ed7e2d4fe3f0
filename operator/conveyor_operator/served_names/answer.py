"""What a service wants to be called at the gateway's root, and what `keeper` says about that. Pure."""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Wish:
    """The served name that an InferenceService requests."""

    name: str
    created_unix: int


class NameState(Enum):
    """The owner of a served name."""

    PENDING = auto()
    """No namespace owns the name, as far as is known."""
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
    """`detail` is the API server's refusal of a pending claim, or the name of the older service."""

    state: NameState = NameState.PENDING
    detail: str = ""
