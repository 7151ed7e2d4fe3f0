"""The kinds of settings that only the engine has. Used by `engine_config`. Pure."""

import re
from typing import Final

from conveyor_process.settings import ValueKind
from conveyor_protocol.request_headers import LEVEL_MAX
from conveyor_protocol.workload import Lengths

ADAPTERS_MAX: Final = 1000
_ADAPTER_NAME: Final = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
MAX_TOKENS: Final = 16_777_216  # limit on the tokens of a context or a step, and on the number of KV blocks


def _parse_shares(text: str) -> tuple[tuple[int, int], ...]:
    """Parse levels and percentages: `50:40,100:20` -> ((50, 40), (100, 20)). Raises ValueError."""
    shares = dict[int, int]()
    for entry in filter(None, text.split(",")):
        match = re.fullmatch("([0-9]{1,4}):([0-9]{1,3})", entry.strip())
        level, percent = map(int, match.groups()) if match else (-1, 0)
        if not (0 <= level <= LEVEL_MAX and 1 <= percent <= 100) or level in shares:
            raise ValueError(entry)
        shares[level] = percent
    return tuple(sorted(shares.items()))


def _parse_lengths(text: str) -> Lengths:
    """Parse lengths at P50 and P95, such as `256,1024`. Raises ValueError."""
    match = re.fullmatch("([0-9]{1,8}),([0-9]{1,8})", text)
    lengths = Lengths(*map(int, match.groups())) if match else Lengths(0, 0)
    if not 1 <= lengths.p50 <= lengths.p95 <= MAX_TOKENS:
        raise ValueError(text)
    return lengths


def _parse_adapters(text: str) -> tuple[tuple[str, str], ...]:
    """Parse names and directories: `sql=/a,fr=/b` -> (("sql", "/a"), ("fr", "/b")). Raises ValueError."""
    adapters = dict[str, str]()
    for entry in filter(None, text.split(",")):
        name, _, directory = entry.strip().partition("=")
        if not re.fullmatch(_ADAPTER_NAME, name) or not directory or name in adapters or len(adapters) == ADAPTERS_MAX:
            raise ValueError(entry)
        adapters[name] = directory
    return tuple(adapters.items())


def _parse_class(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text, re.ASCII):
        raise ValueError(text)
    return text


CLASS: Final = ValueKind("a class as package.module:Class", _parse_class)
ADAPTERS: Final = ValueKind(
    f"at most {ADAPTERS_MAX} names with directories, as sql=/adapters/sql,fr=/adapters/fr; a name has 1 to 63 letters, "
    "digits, '.', '_' or '-'",
    _parse_adapters,
)
LENGTHS: Final = ValueKind(
    f"tokens at P50 and P95, from 1 to {MAX_TOKENS} and in this order, as 256,1024", _parse_lengths
)
SHARES: Final = ValueKind("levels from 0 to 1000 with whole percentages from 1 to 100, as 50:40,100:20", _parse_shares)
