"""How every program listens on its ports."""

import asyncio
import resource
from typing import Final

# New connections that the kernel keeps for a process which does not take them at once. It drops the packets of those
# beyond, whose clients try again after a second.
BACKLOG: Final = 2048


def allow_open_files() -> None:
    """As many as the system lets this process have: many systems begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def port_number(accepting: asyncio.Server) -> int:
    """The real one, also if 0 was asked for."""
    number: int = accepting.sockets[0].getsockname()[1]
    return number


async def close_port(accepting: asyncio.Server, settle_seconds: float = 0.01) -> None:
    """Every connection that was accepted is its server's then.

    A server of Python 3.11's asyncio forgets a connection that it accepts in the turn of the loop in which it is
    closed: its client would wait for ever. So it first stops accepting, and is closed `settle_seconds` later. uvloop's
    forgets none.
    """
    loop = asyncio.get_running_loop()
    for listening in accepting.sockets:
        loop.remove_reader(listening.fileno())
    await asyncio.sleep(settle_seconds)
    accepting.close()
