"""How every program listens on its ports."""

from typing import Final

# New connections that the kernel keeps for a process which does not take them at once. It drops the packets of those
# beyond, whose clients try again after a second.
BACKLOG: Final = 2048
