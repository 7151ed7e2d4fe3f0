"""What callers have used, in rows. Gateways count them, the operator keeps them, `kubectl conveyor usage` shows them.

A day has a limited number of rows. Each namespace has an equal part of them (max-min fairness), so a tenant with many
keys or services takes no rows from others. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

OTHERS: Final = "*"  # no caller has this name
_ACCOUNT: Final = "system:serviceaccount:"

Count = Annotated[int, Meta(ge=0)]
Process = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Day = Annotated[str, Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]


class UsageRow(Struct, frozen=True, array_like=True):
    """What one caller's requests of one class have used of a service, on one day."""

    service: Annotated[str, Meta(max_length=127)]
    """`namespace/name`; empty for services that are gone, and for the sum of several services."""
    caller: Annotated[str, Meta(max_length=384)]
    """The caller's name, or the name that a trusted proxy gave the client; empty for others.

    `NAMESPACE/*` are the further callers of a namespace, `*` those of further namespaces.
    """
    request_class: Annotated[str, Meta(max_length=63)]
    """Empty for services without classes."""
    requests: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    engine_ms: Annotated[float, Meta(ge=0)] = 0.0
    """The requests' share of the time of steps; 0 for runtimes that do not report it."""
    pod_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """How long engine pods of the service were on nodes. The operator counts it, in rows without requests."""


_KEPT: Final = msgspec.json.Decoder(dict[str, list[UsageRow]])  # a day's rows by process


class Usage(Struct, frozen=True):
    """`GET /usage`: what this process has counted today and yesterday, by day (UTC)."""

    process: Process
    """Chosen at random at each start, because the counts begin at 0."""
    days: dict[Day, list[UsageRow]]


class _Page(Struct, frozen=True):
    """`Usage` with rows that are not decoded yet."""

    process: Process
    days: dict[Day, list[msgspec.Raw]]


def decode_usage(page: bytes) -> tuple[Usage, list[str]]:
    """Return the page without its invalid rows, and what is wrong with these. Raises msgspec.DecodeError."""
    errors: list[str] = []
    read = msgspec.json.decode(page, type=_Page)
    return Usage(read.process, {day: list(_decode_rows(rows, errors)) for day, rows in read.days.items()}), errors


def _decode_rows(rows: Iterable[msgspec.Raw], errors: list[str]) -> Iterator[UsageRow]:
    for row in rows:
        try:
            yield msgspec.json.decode(row, type=UsageRow)
        except msgspec.DecodeError as error:
            errors.append(str(error))


def read_kept(data: Mapping[str, str], first: date) -> Iterator[UsageRow]:
    """Yield the rows of the days from `first` on. data: that of the operator's ConfigMap.

    Raises ValueError with the day that cannot be read.
    """
    for day, text in data.items():
        try:
            if date.fromisoformat(day) >= first:
                for rows in _KEPT.decode(text).values():
                    yield from rows
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"a day cannot be read: {day[:20]}") from error


def find_namespace(service: str, caller: str) -> str:
    """Return the namespace for which a row counts; "" without one.

    It is the caller's namespace, or for callers without one that of the service. A sum of several namespaces has none.
    """
    if caller == OTHERS:
        return ""
    if caller.startswith(_ACCOUNT):
        return caller.split(":")[2]
    namespace, slash, _ = caller.partition("/")
    return namespace if slash and ":" not in namespace else service.partition("/")[0]


def sum_rows(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Return the sums by service, caller and class."""
    sums: dict[tuple[str, str, str], UsageRow] = {}
    for row in rows:
        key = row.service, row.caller, row.request_class
        sums[key] = _add(sums[key], row) if key in sums else row
    return list(sums.values())


def _add(one: UsageRow, other: UsageRow) -> UsageRow:
    return UsageRow(
        one.service,
        one.caller,
        one.request_class,
        one.requests + other.requests,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.completion_tokens + other.completion_tokens,
        one.engine_ms + other.engine_ms,
        round(one.pod_seconds + other.pod_seconds, 1),
    )


def limit_rows(rows: Sequence[UsageRow], most: int) -> list[UsageRow]:
    """Return at most `most` rows with the same sums. The namespaces with most rows lose their smallest ones.

    What a namespace loses is added up in one row, and so is what namespaces without a row have used.
    """
    if len(rows) <= most:
        return list(rows)
    by_namespace: dict[str, list[UsageRow]] = {}
    for row in rows:
        by_namespace.setdefault(find_namespace(row.service, row.caller), []).append(row)
    part = max(1, _find_part([len(each) for each in by_namespace.values()], most))
    kept = [row for namespace, of_one in by_namespace.items() for row in _keep(namespace, of_one, part)]
    if len(kept) > most:
        kept.sort(key=_measure, reverse=True)
        kept[most - 1 :] = _sum_up(kept[most - 1 :], OTHERS)
    return sum_rows(kept)


def _find_part(numbers: list[int], most: int) -> int:
    """Return how many each may have, so that the sum is at most `most`."""
    numbers.sort()
    for index, number in enumerate(numbers):
        part = most // (len(numbers) - index)
        if number > part:
            return part
        most -= number
    return most


def _keep(namespace: str, rows: list[UsageRow], most: int) -> list[UsageRow]:
    """Return the `most` rows of a namespace. The last one is the sum of those with the fewest tokens."""
    if len(rows) <= most:
        return rows
    others = f"{namespace}/{OTHERS}" if namespace else OTHERS
    rows = sorted(rows, key=lambda row: (row.caller != others, _measure(row)), reverse=True)
    return rows[: most - 1] + _sum_up(rows[most - 1 :], others)


def _measure(row: UsageRow) -> tuple[float, ...]:
    return row.prompt_tokens + row.completion_tokens, row.requests, row.pod_seconds


def _sum_up(rows: list[UsageRow], caller: str) -> list[UsageRow]:
    """Return one row with the sums, which has a service if it is the same for all."""
    services = {row.service for row in rows}
    service = services.pop() if len(services) == 1 else ""
    return sum_rows(msgspec.structs.replace(row, service=service, caller=caller, request_class="") for row in rows)
