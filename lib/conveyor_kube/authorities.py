"""Follows the file with the cluster's authorities, which the kubelet writes again after somebody rotates them.

Used by whoever opens connections to the API server: `watch`, and the operator's `cluster` and `loop.session`.
"""

import ssl
from pathlib import Path

from conveyor_process.followed_files import FollowedFiles


async def follow_authorities(file: str | None, context: ssl.SSLContext) -> None:
    """Let new connections of `context` trust each new content of `file` too, until cancelled. None: no file.

    Authorities that the file had before stay trusted until the program ends.
    """
    if file:
        path = Path(file)
        await FollowedFiles("cluster_authorities", (path,), lambda: context.load_verify_locations(path)).follow()
