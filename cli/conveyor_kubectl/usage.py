"""`kubectl conveyor usage`: prints what callers have used, from the operator's ConfigMap. For `command`."""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from conveyor_api import names
from conveyor_insight.facts import Unanswered
from conveyor_insight.tables import build_table
from conveyor_kubectl.cluster import Cluster
from conveyor_operator.kinds import CONFIG_MAP
from conveyor_protocol.usage_rows import OTHERS, UsageRow, find_namespace, read_kept

DESCRIPTION: Final = """Show the requests, tokens and engine seconds of keys, services, namespaces or classes, and for
services and namespaces the pod seconds: how long engine pods were on nodes. The days are those of UTC, today included.
The operator keeps 31 days, reads the gateways every 15 seconds, and counts pods every minute."""
_DAYS: Final = re.compile("([1-9][0-9]?)d")
_NO_KEY: Final = "(no key)"

Print = Callable[..., None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by", choices=sorted(_NAMES), default="key", help="what a row stands for (default: %(default)s)"
    )
    parser.add_argument(
        "--since", type=_parse_days, metavar="DAYS", default="1d", help="number of days such as 7d (default: today)"
    )
    parser.add_argument(
        "--system-namespace", metavar="NAME", default=names.SYSTEM_NAMESPACE,
        help="namespace of the release (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="format (default: %(default)s)"
    )


def _parse_days(text: str) -> int:
    if (match := _DAYS.fullmatch(text)) is None:
        raise argparse.ArgumentTypeError("must be a number of days such as 7d")
    return int(match[1])


def show(cluster: Cluster, flags: argparse.Namespace, print_text: Print) -> int:
    """Print the usage. Raises Unanswered."""
    found = cluster.find(CONFIG_MAP.path(flags.system_namespace, names.USAGE_NAME))
    if found is None:
        raise Unanswered(
            f"there is no ConfigMap {names.USAGE_NAME} in {flags.system_namespace}: no gateway has reported usage yet, "
            "or the release is in another namespace (--system-namespace)"
        )
    first = datetime.now(UTC).date() - timedelta(days=flags.since - 1)
    try:
        totals = sum_usage(read_kept(found.get("data") or {}, first), flags.by)
    except ValueError as error:
        raise Unanswered(f"the ConfigMap {names.USAGE_NAME}: {error}") from error
    if flags.output == "json":
        print_text(json.dumps(totals, indent=2))
        return 0
    head: tuple[str, ...] = (flags.by.upper(), "REQUESTS", "PROMPT TOKENS", "CACHED", "OUTPUT TOKENS", "ENGINE SECONDS")
    head += ("POD SECONDS",) if flags.by in _WITH_PODS else ()
    print_text(build_table([head, *(_build_row(name, each) for name, each in totals.items())]))
    return 0


def _build_row(name: str, total: dict[str, Any]) -> tuple[str, ...]:
    pods = (f"{total['podSeconds']:.0f}",) if "podSeconds" in total else ()
    return name, *(str(total[field]) for field in _COUNTS), f"{total['engineSeconds']:.1f}", *pods


def sum_usage(rows: Iterable[UsageRow], by: str) -> dict[str, dict[str, Any]]:
    """Return the sums by name, those with most tokens first."""
    totals: dict[str, dict[str, Any]] = {}
    has_pods = by in _WITH_PODS
    empty = {**dict.fromkeys(_COUNTS, 0), "engineSeconds": 0.0} | ({"podSeconds": 0.0} if has_pods else {})
    for row in rows:
        if not row.requests and not has_pods:
            continue
        total = totals.setdefault(_NAMES[by](row), dict(empty))
        for field, read in _COUNTS.items():
            total[field] += read(row)
        total["engineSeconds"] += row.engine_ms / 1000
        if has_pods:
            total["podSeconds"] += row.pod_seconds
    ordered = sorted(totals, key=lambda name: totals[name]["promptTokens"] + totals[name]["outputTokens"], reverse=True)
    return {name: totals[name] for name in ordered}


def _find_service(row: UsageRow) -> str:
    is_sum = row.caller.rpartition("/")[2] == OTHERS
    return row.service or (OTHERS if is_sum else "(deleted)")


def _find_namespace(row: UsageRow) -> str:
    return find_namespace(row.service, row.caller) or (OTHERS if row.caller == OTHERS else _NO_KEY)


_NAMES: Final[dict[str, Callable[[UsageRow], str]]] = {
    "key": lambda row: row.caller or _NO_KEY,
    "service": _find_service,
    "namespace": _find_namespace,
    "class": lambda row: row.request_class or "(no class)",
}
_WITH_PODS: Final = frozenset({"service", "namespace"})
_COUNTS: Final[dict[str, Callable[[UsageRow], int]]] = {
    "requests": lambda row: row.requests,
    "promptTokens": lambda row: row.prompt_tokens,
    "cachedTokens": lambda row: row.cached_tokens,
    "outputTokens": lambda row: row.completion_tokens,
}
