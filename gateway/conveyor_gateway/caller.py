"""The caller of a request: the API key or the ServiceAccount that the client has proved to have.

`listening` finds the caller before it parses the route, and puts it into the request's `View`. Pure.
"""

from dataclasses import dataclass, field

from conveyor_tokens.verifier import ACCOUNT_PREFIX


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller may use, over all gateways together. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """A proven caller. It can be the key of a dict.

    The names have no spaces or control characters, so they can be logged and be values of labels.
    """

    name: str
    """`NAMESPACE/NAME` of an APIKey, or `system:serviceaccount:NAMESPACE:NAME`. No two callers have the same name."""
    namespace: str
    """The namespace of the APIKey or ServiceAccount. Whoever may write APIKeys there chooses the other fields."""
    owner: str = ""
    """Who uses the key, as its namespace states; "" if it does not. Owners are unique only within their namespace."""
    max_class: str = ""
    """The most urgent class of `queue.classes` that the caller may have; "": no limit of its own."""
    limits: Limits | None = None
    services: frozenset[str] = field(default=frozenset(), hash=False)
    """The services that an APIKey names, as `NAMESPACE/NAME` or `NAMESPACE/*`; empty for a ServiceAccount."""

    @property
    def full_owner(self) -> str:
        """The owner as `NAMESPACE/OWNER`; "" if the namespace states none."""
        return f"{self.namespace}/{self.owner}" if self.owner else ""

    @property
    def account(self) -> str:
        """The `NAMESPACE/NAME` of a ServiceAccount."""
        return f"{self.namespace}/{self.name.rpartition(':')[2]}"

    @property
    def is_account(self) -> bool:
        """Whether the caller is a ServiceAccount."""
        return self.name.startswith(ACCOUNT_PREFIX)
