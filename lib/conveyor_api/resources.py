"""`spec.resources`: the resources that one engine requests."""

import re
from typing import Annotated, ClassVar, Final

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.quantities import IntOrString, parse_quantity

_RESOURCE_NAME_PATTERN: Final = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


def _is_amount(value: int | str) -> bool:
    try:
        return parse_quantity(value) >= 0
    except ValueError:
        return False


# Kubernetes limits the estimated cost of rules. In the estimate, a number-or-string is as long as a whole request. The
# rules here are near the limit, so few resources are allowed. To save cost, a rule does not check first that a value is
# a quantity, except where an evaluation error would otherwise hide the rule's message.
_Amount = Annotated[
    int | str,
    IntOrString(),
    Rule(
        "type(self) == int ? self >= 0 : isQuantity(self) && !quantity(self).isLessThan(quantity('0'))",
        "must be a quantity such as 500m, 2 or 10Gi, and not negative",
        _is_amount,
    ),
]
_NAMES: Final = Rule(
    f"self.all(name, name.matches('{_RESOURCE_NAME_PATTERN}'))",
    "must name resources as Kubernetes does, for example cpu, memory or nvidia.com/gpu",
    lambda amounts: all(re.fullmatch(_RESOURCE_NAME_PATTERN, name) for name in amounts),
)
_WHOLE: Final = Rule(
    "self.all(name, !name.contains('/') || type(self[name]) == int || string(self[name]).matches('^[0-9]+$'))",
    "must request GPUs and other devices in whole numbers, for example nvidia.com/gpu: 1",
    lambda amounts: all("/" not in name or str(amount).isdecimal() for name, amount in amounts.items()),
)


class Resources(ApiModel):
    """Resources of the engine's container. Request the GPU here, for example `limits: {nvidia.com/gpu: 1}`."""

    rules: ClassVar = (
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) ||"
            " !quantity(string(self.requests[name])).isGreaterThan(quantity(string(self.limits[name]))))",
            "requests must not be more than limits",
            lambda resources: all(
                name not in resources.limits or parse_quantity(value) <= parse_quantity(resources.limits[name])
                for name, value in resources.requests.items()
            ),
            field="requests",
        ),
        Rule(
            "!has(self.requests) || self.requests.all(name, !name.contains('/')"
            " || (has(self.limits) && name in self.limits"
            " && string(self.limits[name]) == string(self.requests[name])))",
            "GPUs and other devices go into limits; in requests they may only repeat the same number",
            lambda resources: all(
                "/" not in name or str(resources.limits.get(name)) == str(value)
                for name, value in resources.requests.items()
            ),
            field="requests",
        ),
    )

    # With more entries, the rules above exceed the API server's cost limit.
    requests: Annotated[dict[str, _Amount], Field(max_length=7), _NAMES, _WHOLE] = Field(default_factory=dict)
    """Amounts that are reserved."""
    limits: Annotated[dict[str, _Amount], Field(max_length=10), _NAMES, _WHOLE] = Field(default_factory=dict)
    """Amounts that are never exceeded. Set GPUs here."""
