"""Serves `/engines` and `/steps`, with `?service=<namespace>/<name>`: a few families of the metrics of the service's
engines, and their last steps.

The console requests them from any gateway, because only gateways and Prometheus may connect to engines.
"""

import re
from typing import Final

import msgspec

from conveyor_api.names import PROMETHEUS_PATH
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import EnginePage, fetch
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.engine_pages import STEPS_PATH, EngineSteps, StepRecord, Steps
from conveyor_protocol.pages import ENGINE_FAMILIES, Engines

_MAX_ENGINES: Final = 8
_ENGINE_SECONDS: Final = 0.8  # the console waits two seconds for a gateway
_ENGINE_BYTES_MAX: Final = 512 << 10
_LINES_BYTES_MAX: Final = 32 << 10  # of the wanted families of one engine
_WANTED: Final = re.compile(rf"^(?:{'|'.join(map(re.escape, ENGINE_FAMILIES))})[_{{ ].*$".encode(), re.MULTILINE)


async def read_engines(catalog: Catalog, ledger: Ledger, service: str, transport: Transport = PLAIN) -> Engines:
    """Return the metrics of the service's first engines; of none if the service is unknown."""
    addresses = sorted(catalog.engines(service))[:_MAX_ENGINES]
    with ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
        pages = await fetch(hold, addresses, PROMETHEUS_PATH, _ENGINE_SECONDS, _ENGINE_BYTES_MAX, transport=transport)
        return Engines({address: text for address, page in pages.items() if (text := _select(page))})


async def read_steps(catalog: Catalog, ledger: Ledger, service: str, transport: Transport = PLAIN) -> EngineSteps:
    """Return the last steps of the service's first engines; of none if the service is unknown."""
    addresses = sorted(catalog.engines(service))[:_MAX_ENGINES]
    with ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
        pages = await fetch(hold, addresses, STEPS_PATH, _ENGINE_SECONDS, transport=transport)
        return EngineSteps({address: steps for address, page in pages.items() if (steps := _parse_steps(page))})


def _parse_steps(page: EnginePage | None) -> list[StepRecord]:
    try:
        return [] if page is None or page.status != 200 else msgspec.json.decode(page.body, type=Steps)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []


def _select(page: EnginePage | None) -> str:
    """Return the lines of the wanted families; "" if the engine has returned none, or an unusual number of them."""
    if page is None or page.status != 200:
        return ""
    lines = b"\n".join(_WANTED.findall(page.body))
    return lines.decode(errors="replace") if len(lines) <= _LINES_BYTES_MAX else ""
