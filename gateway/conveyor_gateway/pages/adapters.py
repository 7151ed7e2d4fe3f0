"""Serves `GET /adapters?service=<namespace>/<name>`: what the service's engines have made of its LoRA adapters.

The operator requests it from any gateway, because operators cannot connect to engines.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import EnginePage, fetch
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.engine_pages import ADAPTERS_PATH, AdapterState, AdapterStates
from conveyor_protocol.pages import AdapterCounts, Adapters

_ENGINE_SECONDS: Final = 0.4  # the operator waits one second for a gateway
_ENGINE_BYTES_MAX: Final = 512 << 10  # 1,000 adapters


async def read_adapters(catalog: Catalog, ledger: Ledger, service: str, transport: Transport = PLAIN) -> Adapters:
    """Return the counts of each adapter that the service has now. An engine that does not answer is left out."""
    known = catalog.directory.services.get(service)
    with ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
        pages = await fetch(
            hold, catalog.engines(service), ADAPTERS_PATH, _ENGINE_SECONDS, _ENGINE_BYTES_MAX, transport=transport
        )
    found: dict[str, dict[str, list[AdapterState]]] = {name: {} for name in (known.adapters if known else ())}
    for states in map(_parse, pages.values()):
        for name, state in states.items():
            if name in found:
                found[name].setdefault(state.directory, []).append(state)
    return Adapters({name: {at: _count(each) for at, each in some.items()} for name, some in found.items()})


def _parse(page: EnginePage | None) -> AdapterStates:
    try:
        return {} if page is None or page.status != 200 else msgspec.json.decode(page.body, type=AdapterStates)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _count(states: Sequence[AdapterState]) -> AdapterCounts:
    counts = Counter(each.state for each in states)
    message = next((each.message for each in states if each.state == "Failed"), "")
    return AdapterCounts(counts["Ready"], counts["Failed"], sum(each.serves for each in states), message)
