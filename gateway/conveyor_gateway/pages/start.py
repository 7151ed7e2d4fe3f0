"""Serves `GET /start?service=<namespace>/<name>&pod=<uid>`: how the engine in that pod started.

The operator requests it from any gateway once a pod is Ready, because operators cannot connect to engines. The
operator gets the other durations of a start from Kubernetes.
"""

from typing import Final

from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import fetch, parse_load
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.engine_pages import LOAD_PATH
from conveyor_protocol.pages import Start

_ENGINE_SECONDS: Final = 0.4  # the operator waits one second for a gateway


async def read_start(catalog: Catalog, ledger: Ledger, service: str, pod: str, transport: Transport = PLAIN) -> Start:
    """Return how the engine started. Raises GatewayError if this gateway does not know the engine, or gets no page."""
    address = catalog.find_engine(service, pod)
    with ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
        pages = await fetch(hold, [address] if address else [], LOAD_PATH, _ENGINE_SECONDS, transport=transport)
    page = pages.get(address) if address else None
    if page is None:
        raise GatewayError(f"no ready engine of {service} in pod {pod} responds", Code.NO_ENGINE)
    return Start(parse_load(page).warm_up_seconds)
