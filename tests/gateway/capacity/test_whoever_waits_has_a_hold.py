"""Tests by construction: no coroutine of the gateway waits for an engine or reads a body without a hold."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import conveyor_gateway
from conveyor_gateway.capacity.ledger import Hold
from conveyor_gateway.engines import fetching
from conveyor_gateway.engines.exchange import EngineRequest
from conveyor_gateway.engines.fetching import SharedPages
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.relaying.bodies import BodyReader

OURS = ("conveyor_gateway.engines", "conveyor_gateway.relaying")
SOURCE = Path(conveyor_gateway.__file__).parent
# What opens a connection, or sends a request on one.
OPENS = re.compile(r"ClientSession|TCPConnector|open_connection|create_connection|sock_connect\(|urllib\.request")
READS_BODIES = re.compile(r"(?:request|response)\.content\b|\brequest\.(?:read|text|json|post|multipart)\(")


def find_coroutines(where: object) -> list[Callable[..., object]]:
    return [each for _, each in inspect.getmembers(where, inspect.iscoroutinefunction) if each.__name__[0] != "_"]


def test_every_coroutine_that_waits_for_an_engine_or_reads_a_body_takes_a_hold() -> None:
    assert get_type_hints(EngineRequest)["hold"] is Hold, "`EngineSession.send` takes it in the request"
    for where in (EngineSession, SharedPages, fetching, BodyReader):
        coroutines = find_coroutines(where)
        assert coroutines
        for each in coroutines:
            if each.__module__.startswith(OURS) and each.__name__ != "close":
                taken = set(get_type_hints(each).values())
                assert taken & {Hold, EngineRequest}, each


def find_files(pattern: re.Pattern[str]) -> set[str]:
    paths = SOURCE.rglob("*.py")
    return {str(path.relative_to(SOURCE)) for path in paths if pattern.search(path.read_text())}


def test_only_these_modules_open_connections_and_read_bodies() -> None:
    """The self-check connects to this process's own port, one request at a time."""
    assert find_files(OPENS) == {
        "engines/connection.py",
        "engines/fetching.py",
        "engines/transport.py",
        "listening/self_check.py",
    }
    engines = {"engines/exchange.py", "engines/fetching.py", "engines/session.py"}
    assert find_files(READS_BODIES) == engines | {"relaying/bodies.py"}
