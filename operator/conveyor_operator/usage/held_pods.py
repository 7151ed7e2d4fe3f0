"""How long engine pods have been on nodes. Pure. Used by `keeper`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class HeldPod(NamedTuple):
    """An engine pod on a node: its service, which is `namespace/name`, and when it was assigned to the node."""

    service: str
    since_unix: float


def count_seconds(pods: Iterable[HeldPod], begin_unix: float, end_unix: float) -> dict[str, float]:
    """Return how long these pods were on nodes in this period, by service."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for pod in pods:
        seconds[pod.service] += max(0.0, end_unix - max(begin_unix, pod.since_unix))
    return dict(seconds)
