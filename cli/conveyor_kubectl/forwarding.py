"""Connects to a pod with `kubectl port-forward`, which NetworkPolicies do not block.

kubectl is installed, because it starts this program. The kubectl started here logs in as the same user.
"""

import argparse
import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from conveyor_insight.facts import Unanswered

_START_SECONDS: Final = 30


def kubectl_flags(flags: argparse.Namespace) -> list[str]:
    """Return the flags to pass on to kubectl."""
    found = (("kubeconfig", flags.kubeconfig), ("context", flags.context))
    return [f"--{name}={value}" for name, value in found if value is not None]


@asynccontextmanager
async def forwarded(namespace: str, resource: str, port: int, kubectl_flags: Sequence[str]) -> AsyncIterator[str]:
    """Yield a URL for a port of `service/NAME` or `pod/NAME`, valid inside `async with`. Raises Unanswered."""
    program = shutil.which("kubectl")
    if program is None:
        raise Unanswered("kubectl is not in PATH; it is needed to forward a port of the cluster")
    command = [program, *kubectl_flags, "port-forward", "--address=127.0.0.1", "-n", namespace, resource, f":{port}"]
    # A separate session, so that Ctrl-C does not end kubectl: the port is needed until requests have ended.
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    drains: list[asyncio.Task[bytes]] = []
    try:
        url = await _read_url(process, resource)
        assert process.stdout is not None
        assert process.stderr is not None
        # kubectl writes a line for each connection, and a full pipe would block it.
        drains = [asyncio.create_task(_drain(stream)) for stream in (process.stdout, process.stderr)]
        yield url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        for drain in drains:
            drain.cancel()


async def _read_url(process: asyncio.subprocess.Process, resource: str) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            line = (await process.stdout.readline()).decode(errors="replace")
            if (match := re.search(r"from (127\.0\.0\.1:[0-9]+)", line)) is not None:
                return f"http://{match[1]}"
            problem = (await process.stderr.read(2000)).decode(errors="replace").strip()
    except TimeoutError:
        raise Unanswered(f"kubectl port-forward {resource} does not begin within {_START_SECONDS} s") from None
    raise Unanswered(f"kubectl port-forward {resource}: {problem or line.strip() or 'ended'}")


async def _drain(stream: asyncio.StreamReader) -> bytes:
    while await stream.read(1 << 16):
        pass
    return b""
