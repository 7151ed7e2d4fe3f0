"""APIKey: who may use services with a secret key, and how much. Only the key's hash is in the object.

A key is `sk-conveyor-NAMESPACE-` and 64 random hexadecimal digits. It begins with the namespace of its APIKey, so an
APIKey with a copied hash in another namespace matches no key (docs/adr/0178). `kubectl conveyor key` makes keys; the
gateway verifies them. Pure.
"""

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError

from conveyor_api import names
from conveyor_api.access import EVERY, LABEL
from conveyor_api.base import ApiModel, Rule
from conveyor_api.errors import InvalidResource
from conveyor_api.queue import ChosenClass
from conveyor_api.resource import Metadata

KEY_PREFIX: Final = "sk-conveyor-"
SECRET_DIGITS: Final = 64  # of 32 random bytes
_SHORTEST_PREFIX: Final = len(KEY_PREFIX) + 1  # without a namespace, which has up to 63 characters
_LONGEST_PREFIX: Final = _SHORTEST_PREFIX + 63
_SHA256: Final = "^[0-9a-f]{64}$"
_TIME: Final = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"
_SERVICE: Final = rf"^([*]|({LABEL}/)?[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?)$"
_OWNER: Final = "^[!-~]+$"


def _is_time(text: str) -> bool:
    try:
        return re.fullmatch(_TIME, text) is not None and parse_time_unix(text) > 0
    except ValueError:
        return False


def parse_time_unix(text: str) -> float:
    """Return the Unix time of a `Time`. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()


Time = Annotated[
    str,
    Field(max_length=20),
    Rule(
        f"self.matches('{_TIME}') && timestamp(self) > timestamp('1970-01-01T00:00:00Z')",
        "must be a time in UTC such as 2027-01-31T00:00:00Z",
        _is_time,
    ),
]
ServiceReference = Annotated[
    str,
    Field(max_length=127),
    Rule(
        f"self.matches('{_SERVICE}')",
        "must be the name of a service, * for all services of this namespace, or NAMESPACE/NAME",
        lambda value: re.fullmatch(_SERVICE, value) is not None,
    ),
]
Day = Annotated[str, Field(max_length=10)]
Amount = Annotated[int, Field(ge=1, le=1_000_000_000_000)]


class KeyHash(ApiModel):
    """The hash of one key."""

    sha256: Annotated[
        str,
        Field(max_length=64),
        Rule(
            f"self.matches('{_SHA256}')",
            "must be 64 lower-case hexadecimal digits; make keys with kubectl conveyor key create",
            lambda value: re.fullmatch(_SHA256, value) is not None,
        ),
    ]
    """SHA-256 of the whole key, as 64 lower-case hexadecimal digits."""
    expires: Time | None = None
    """Time after which this key is rejected, for example the older one of a rotation."""


class KeyLimits(ApiModel):
    """What the caller may use, over all gateways together."""

    requests_per_minute: Amount | None = None
    """Requests in a minute."""
    tokens_per_minute: Amount | None = None
    """Tokens of prompts and answers in a minute."""
    tokens_per_day: Amount | None = None
    """Tokens of prompts and answers in a day."""
    concurrent_requests: Amount | None = None
    """Requests at the same time, including those in queues."""


class APIKeySpec(ApiModel):
    """The key's hash, and what the key allows."""

    hashes: Annotated[list[KeyHash], Field(min_length=1, max_length=2)]
    """Hashes of the accepted keys: one, or during a rotation two."""
    services: Annotated[list[ServiceReference], Field(max_length=64)] = Field(default_factory=lambda: [EVERY])
    """Services that the key may use: names in this namespace, `*` for all of them, or NAMESPACE/NAME of a service
    that lists this namespace in `access.keyNamespaces`."""
    owner: (
        Annotated[
            str,
            Field(min_length=1, max_length=63),
            Rule(
                f"self.matches('{_OWNER}')",
                "must be printable ASCII without spaces, for example a team or an address",
                lambda value: re.fullmatch(_OWNER, value) is not None,
            ),
        ]
        | None
    ) = None
    """Who uses the key, for limits and usage."""
    max_class: ChosenClass | None = None
    """Most urgent class of `queue.classes` that the key's requests may have."""
    limits: KeyLimits | None = None
    """Limits of the key's requests."""
    expires: Time | None = None
    """Time after which the gateways reject the key."""


class KeyRejection(ApiModel):
    """Why a gateway rejected a request with the key."""

    day: Day
    """Last day (UTC) with a rejected request."""
    reason: Annotated[str, Field(max_length=32)]
    """Why the first of its requests was rejected at a gateway: `Expired`, `RateLimited` by a limit, or `NotFound`: it
    named a service or model that does not exist or that the key may not use."""


class APIKeyStatus(ApiModel):
    """What gateways have seen of the key. Days are those of UTC."""

    last_used: Day | None = None
    """Last day (UTC) on which a valid key was used."""
    last_rejection: KeyRejection | None = None
    """Last rejection of a request with the key."""


class APIKey(ApiModel):
    """A secret key with which clients use services. The object has only the key's hash."""

    api_version: Literal["conveyor.dev/v1alpha1"] = names.API_VERSION
    kind: Literal["APIKey"] = names.API_KEY_KIND
    metadata: Metadata
    spec: APIKeySpec
    status: APIKeyStatus | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse `body`, JSON from the API server. Raises InvalidResource."""
        try:
            return cls.model_validate(dict(body), by_alias=True, by_name=False, extra="ignore")
        except ValidationError as error:
            raise InvalidResource.of(error) from error


def build_key(namespace: str, secret: bytes) -> str:
    """Return the key for 32 random bytes and the namespace of its APIKey."""
    return f"{KEY_PREFIX}{namespace}-{secret.hex()}"


def find_key_namespace(key: str) -> str | None:
    """Return the namespace of a key's APIKey; None if the text has not the form of a key.

    The namespace may be one that cannot exist. Gateways call this for each request, so it uses no regular expression.
    """
    end = len(key) - SECRET_DIGITS
    if not (_SHORTEST_PREFIX < end <= _LONGEST_PREFIX and key.startswith(KEY_PREFIX) and key[end - 1] == "-"):
        return None
    try:
        has_digits = bytes.fromhex(key[end:]).hex() == key[end:]
    except ValueError:
        return None
    return key[len(KEY_PREFIX) : end - 1] if has_digits and key.isascii() else None


def hash_key(key: str) -> str:
    """Return the hash of a key for `spec.hashes`."""
    return hashlib.sha256(key.encode()).hexdigest()
