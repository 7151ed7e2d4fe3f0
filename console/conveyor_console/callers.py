"""Decides which names of callers a reader sees. Pure.

Whoever may list the APIKeys of a namespace sees the names of its callers. For others, the callers of a namespace are
one.
"""

from collections.abc import Iterable, Set
from typing import Final

from conveyor_console.requests import Waiting
from conveyor_protocol.usage_rows import OTHERS, UsageRow, find_namespace, sum_rows

_ACCOUNT: Final = "system:serviceaccount:"
NO_KEY: Final = "without a key"


def select_usage(rows: Iterable[UsageRow], seen: Set[str], named: Set[str]) -> list[UsageRow]:
    """Return the sums of all classes that a reader may see, those with most tokens first.

    seen: namespaces whose services the reader sees. named: those whose callers. "" is in them if it is all namespaces.
    """
    shown = []
    for row in rows:
        namespace = find_namespace(row.service, row.caller)
        if row.service.partition("/")[0] in seen or namespace in named:
            caller = _hide(row.caller, namespace, named)
            shown.append(UsageRow(row.service, caller, "", *_read_counts(row)))
    return sorted(
        sum_rows(shown), key=lambda row: (-row.prompt_tokens - row.completion_tokens, row.caller, row.service)
    )


def select_waiting(clients: Iterable[Waiting], service: str, named: Set[str], most: int) -> list[Waiting]:
    """Return at most `most` clients whose requests wait, the longest wait first. Clients without a key are one.

    The client with most requests is among them, because it may be why the others wait.
    """
    sums: dict[tuple[str, str], Waiting] = {}
    for each in clients:
        caller = each.caller if is_caller(each.caller) else ""
        caller = _hide(caller, find_namespace(service, caller), named)
        key = each.request_class, caller
        before = sums.get(key, Waiting(caller, each.request_class, 0, 0.0))
        seconds = max(before.seconds, each.seconds)
        sums[key] = Waiting(caller, each.request_class, before.queued + each.queued, seconds)
    ordered = sorted(sums.values(), key=lambda each: (-each.seconds, each.caller, each.request_class))
    shown, largest = ordered[:most], max(ordered, key=lambda each: each.queued, default=None)
    if largest is not None and largest not in shown:
        shown[-1] = largest
    return shown


def find_namespaces(services: Iterable[str], callers: Iterable[tuple[str, str]]) -> tuple[set[str], set[str]]:
    """Return the namespaces of services, and those of callers as (service, caller)."""
    return {each.partition("/")[0] for each in services}, {find_namespace(*each) for each in callers}


def is_caller(client: str) -> bool:
    """Return whether a client is the caller of a namespace, and not an address or a name that a proxy chose."""
    return client.startswith(_ACCOUNT) or ("/" in client and ":" not in client)


def show_caller(caller: str) -> str:
    """Return the name as people read it."""
    if not caller:
        return NO_KEY
    namespace, slash, name = caller.rpartition("/")
    if name == OTHERS:
        return f"others of {namespace}" if slash else "others"
    if caller.startswith(_ACCOUNT):
        return f"ServiceAccount {caller.removeprefix(_ACCOUNT).replace(':', '/')}"
    return caller


def show_service(row: UsageRow) -> str:
    """Return the service of a row of usage. A sum of several services, and a service that is gone, have none."""
    return row.service or ("several" if row.caller.rpartition("/")[2] == OTHERS else "deleted")


def _hide(caller: str, namespace: str, named: Set[str]) -> str:
    if not caller or namespace in named:
        return caller
    return f"{namespace}/{OTHERS}" if namespace else OTHERS


def _read_counts(row: UsageRow) -> tuple[int, int, int, int, float]:
    return row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.engine_ms
