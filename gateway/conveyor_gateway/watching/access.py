"""Who may use a service: the rules of `spec.access`, and the gateway's own mode. Pure.

`catalog` reads the rules, and `view` applies them to the caller of a request.
"""

from dataclasses import dataclass

from conveyor_api.access import EVERY, Access, AccessMode
from conveyor_gateway.caller import Caller
from conveyor_gateway.settings import DefaultAccess


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one service."""

    mode: AccessMode | None = None
    accounts: frozenset[str] = frozenset()  # `NAMESPACE/NAME` or `NAMESPACE/*`
    key_namespaces: frozenset[str] = frozenset()  # other namespaces whose keys may name the service

    def need_proof(self, default: DefaultAccess) -> bool:
        """Return whether only proven callers may use the service."""
        return default == "Enforced" or (self.mode or default) == "Required"

    def allow(self, caller: Caller, namespace: str, name: str) -> bool:
        """Return whether the caller may use the service NAMESPACE/NAME, which has these rules."""
        if caller.is_account:
            return not self.accounts.isdisjoint((f"{caller.namespace}/{EVERY}", caller.account))
        is_granted = caller.namespace == namespace or caller.namespace in self.key_namespaces
        services = caller.services
        return is_granted and (f"{namespace}/{EVERY}" in services or f"{namespace}/{name}" in services)


WITHOUT_RULES = Rules()


def parse_rules(access: Access) -> Rules:
    """Parse `spec.access`. Services without it share one object."""
    rules = Rules(access.mode, frozenset(access.service_accounts), frozenset(access.key_namespaces))
    return WITHOUT_RULES if rules == WITHOUT_RULES else rules
