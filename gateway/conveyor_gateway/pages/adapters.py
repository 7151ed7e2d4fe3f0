"""Serves `GET /adapters?service=<namespace>/<name>`: what the service's engines have made of its LoRA adapters.

The operator requests it from any gateway, because operators cannot connect to engines.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import fetch_loads
from conveyor_gateway.engines.tls import EngineTls
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.engine_pages import AdapterState
from conveyor_protocol.pages import AdapterCounts, Adapters

_ENGINE_SECONDS: Final = 0.4  # the operator waits one second for a gateway


async def read_adapters(catalog: Catalog, ledger: Ledger, service: str, tls: EngineTls | None = None) -> Adapters:
    """Return the counts of each adapter that the service has now. An engine that does not answer is left out."""
    known = catalog.directory.services.get(service)
    with ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
        loads = await fetch_loads(hold, catalog.engines(service), _ENGINE_SECONDS, tls)
    found: dict[str, dict[str, list[AdapterState]]] = {name: {} for name in (known.adapters if known else ())}
    for load in loads.values():
        for name, state in load.adapters.items():
            if name in found:
                found[name].setdefault(state.directory, []).append(state)
    return Adapters({name: {at: _count(each) for at, each in some.items()} for name, some in found.items()})


def _count(states: Sequence[AdapterState]) -> AdapterCounts:
    counts = Counter(each.state for each in states)
    message = next((each.message for each in states if each.state == "Failed"), "")
    return AdapterCounts(counts["Ready"], counts["Failed"], sum(each.serves for each in states), message)
