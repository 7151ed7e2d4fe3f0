"""`--verbose`: prints the logs of the gateway, the engines and the jobs as they grow. Used by `running`."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

_LOOK_SECONDS: Final = 0.25


async def follow_logs(folder: Path, print_line: Callable[[str], None]) -> None:
    """Print each new line of the logs below `folder`, behind its file's name, until cancelled."""
    ends: dict[Path, int] = {}
    while True:
        for path in _list_logs(folder):
            for line in _read_new_lines(path, ends):
                print_line(f"{path.relative_to(folder).with_suffix('')}: {line}")
        await asyncio.sleep(_LOOK_SECONDS)


def _list_logs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.log"))


def _read_new_lines(path: Path, ends: dict[Path, int]) -> list[str]:
    with path.open("rb") as log:
        log.seek(ends.get(path, 0))
        *lines, rest = log.read().split(b"\n")
        ends[path] = log.tell() - len(rest)
    return [line.decode(errors="replace") for line in lines]
