"""Tests that aiohttp and uvicorn have the private names that our protocols use. Both are pinned to exact releases.

A test that fails here says which name a new release lacks: read its changes, then adapt the class and the pin.
"""

import ast
import inspect
import re
import textwrap
import tomllib
from importlib.metadata import version

import aiohttp.client_proto
import aiohttp.connector
import aiohttp.web_protocol
import aiohttp.web_request
import aiohttp.web_server
import pytest
import uvicorn.protocols.http.httptools_impl
import uvicorn.server

from conveyor_engine.serving import server
from conveyor_engine.serving.http import connection
from conveyor_gateway.engines import connection as engine_connection
from conveyor_http import connection as http_connection
from conveyor_http import server as http_server
from e2e.cluster.paths import REPOSITORY

EXTENDED: tuple[type, ...] = (
    http_connection.Connection,
    http_server.Server,
    http_server.AppRunner,
    engine_connection._Connection,
    engine_connection.Connector,
    connection.Connection,
    server._Server,
)
# What is read of objects that those classes hold, what is replaced in them, and what the library calls of them.
HELD = {
    uvicorn.protocols.http.httptools_impl.RequestResponseCycle: (
        "chunked_encoding", "expected_content_length", "keep_alive", "more_body", "response_complete",
        "response_started", "scope",
    ),
    uvicorn.protocols.http.httptools_impl.HttpToolsProtocol: ("connections", "eof_received", "send_400_response"),
    uvicorn.server.Server: ("capture_signals", "lifespan", "server_state", "should_exit"),
    aiohttp.web_protocol.RequestHandler: ("_parser", "eof_received", "handle_error", "writing_paused"),
    aiohttp.web_server.Server: ("__call__", "connections"),
    aiohttp.connector.TCPConnector: ("_factory",),
    aiohttp.web_request.BaseRequest: ("_prepare_hook",),
}  # fmt: skip


def parse(kind: type) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(kind)))


def find_attributes(tree: ast.AST, owner: str, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Return the attributes of `owner` (`self`, `super()`) that the code reads or sets."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, context))
    return {node.attr for node in found if ast.unparse(node.value) == owner}


def find_used_names(kind: type) -> set[str]:
    """Return the attributes of `self` and `super()` that a class uses but does not define itself."""
    tree = parse(kind)
    begun = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    made = set(vars(kind)).union(*(find_attributes(node, "self", ast.Store) for node in begun))
    return (find_attributes(tree, "self") - made) | find_attributes(tree, "super()")


def find_names(kind: type) -> set[str]:
    """Return the names that a library's class has."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith(("aiohttp", "uvicorn"))]
    return set(dir(kind)).union(*(find_attributes(parse(base), "self", ast.Store) for base in bases))


@pytest.mark.parametrize("kind", EXTENDED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_library_has_what_a_class_of_ours_uses_of_it(kind: type) -> None:
    base = kind.__bases__[0]
    missing = find_used_names(kind) - find_names(base)
    assert not missing, f"{base.__module__}: {base.__qualname__} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize("kind", HELD, ids=lambda kind: kind.__name__)
def test_a_library_has_what_is_used_of_its_objects(kind: type) -> None:
    missing = set(HELD[kind]) - find_names(kind)
    assert not missing, f"{kind.__module__}: {kind.__qualname__} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize("library", ["aiohttp", "uvicorn"])
def test_a_library_whose_insides_are_used_is_kept_to_one_minor_version(library: str) -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [each for extra in extras.values() for each in extra if each.startswith(library)]
    major, minor, *_ = map(int, version(library).split("."))
    assert requirements
    for requirement in requirements:
        assert re.search(rf">={major}\.{minor}(\.\d+)?,<{major}\.{minor + 1}$", requirement), requirement
