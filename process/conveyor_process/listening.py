"""How every program listens on its ports."""

import resource
from typing import Final

# New connections that the kernel keeps for a process which does not take them at once. It drops the packets of those
# beyond, whose clients try again after a second.
BACKLOG: Final = 2048


def allow_open_files() -> None:
    """As many as the system lets this process have: many systems begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
