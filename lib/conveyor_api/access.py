"""`spec.access`: who may use a service through the gateways."""

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule

LABEL: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
EVERY: Final = "*"
_ACCOUNT: Final = "^[a-z0-9-]+/([*]|[a-z0-9.-]+)$"

AccessMode = Literal["Open", "Required"]
Namespace = Annotated[str, Field(min_length=1, max_length=63)]
Account = Annotated[
    str,
    Field(max_length=317),
    Rule(
        f"self.matches('{_ACCOUNT}')",
        "must be NAMESPACE/NAME or NAMESPACE/*",
        lambda value: re.fullmatch(_ACCOUNT, value) is not None,
    ),
]


class Access(ApiModel):
    """Who may use the service."""

    mode: AccessMode | None = None
    """Open: everyone. Required: callers with an APIKey or a ServiceAccount's token. Default: the chart's
    `gateway.access`."""
    service_accounts: Annotated[list[Account], Field(max_length=64)] = Field(default_factory=list)
    """ServiceAccounts, as NAMESPACE/NAME or NAMESPACE/*."""
    key_namespaces: Annotated[list[Namespace], Field(max_length=64)] = Field(default_factory=list)
    """Other namespaces whose keys may name it."""
