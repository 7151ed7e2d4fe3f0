"""The limits of namespaces and owners, which the platform team sets (`--limits`). Pure."""

from typing import Annotated, Final

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from conveyor_gateway.caller import Caller, Limits
from conveyor_process.settings import ValueKind

_EVERY: Final = "*"
_Amount = Annotated[int, Meta(ge=1, le=10**12)] | None


class _Limits(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The fields of `limits` of an APIKey (`conveyor_api.api_key`)."""

    requests_per_minute: _Amount = None
    tokens_per_minute: _Amount = None
    tokens_per_day: _Amount = None
    concurrent_requests: _Amount = None

    def convert(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.concurrent_requests)


class GivenLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of namespaces by name, and of owners by `NAMESPACE/OWNER`. `*` stands for each one that is not listed."""

    namespaces: dict[str, _Limits] = {}
    owners: dict[str, _Limits] = {}

    def find(self, caller: Caller) -> list[tuple[str, Limits]]:
        """Return the subjects of the caller that have limits: its owner, and its namespace."""
        found = []
        owner = caller.full_owner
        if owner and (of_owner := self.owners.get(owner) or self.owners.get(_EVERY)) is not None:
            found.append((f"the owner {owner}", of_owner.convert()))
        if (of_all := self.namespaces.get(caller.namespace) or self.namespaces.get(_EVERY)) is not None:
            found.append((f"the namespace {caller.namespace}", of_all.convert()))
        return found


_DECODER: Final = Decoder(GivenLimits)


def _parse(text: str) -> GivenLimits:
    try:
        return _DECODER.decode(text or "{}")
    except DecodeError as error:  # also a ValidationError
        raise ValueError(str(error)) from error


GIVEN_LIMITS: Final = ValueKind('JSON such as `{"namespaces": {"*": {"requestsPerMinute": 600}}}`', _parse)
