"""The data of the demo: readings of the cluster and the clients during the burst, and the times of events."""

import time
from dataclasses import dataclass, field

from conveyor_load.percentiles import percentile
from e2e.load import Load

WANTED_REPLICAS = 3
WINDOW_SECONDS = 10.0  # of the figures of the clients' side


@dataclass(slots=True)
class Sample:
    """The figures of the cluster, and of the clients in the last seconds. None: the figure is not known."""

    at: float
    queue_depth: float | None
    in_flight: float | None
    desired: int
    ready: int
    tokens_per_second: float = 0.0
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    event: str = ""  # what has changed since the sample before


@dataclass(slots=True)
class Story:
    """The samples, and the times of events in seconds since the burst began."""

    began: float
    decided: float | None = None
    first_new_pod: float | None = None
    all_ready: float | None = None
    burst_ended: float | None = None
    back_to_one: float | None = None
    samples: list[Sample] = field(default_factory=list)

    def note(self, sample: Sample) -> None:
        before = self.samples[-1] if self.samples else None
        self.samples.append(sample)
        since = sample.at - self.began
        events = []
        if sample.desired > 1 and self.decided is None:
            self.decided = since
        if sample.ready > 1 and self.first_new_pod is None:
            self.first_new_pod = since
        if sample.ready >= WANTED_REPLICAS and self.all_ready is None:
            self.all_ready = since
        if self.all_ready is not None and sample.desired == sample.ready == 1:
            self.back_to_one = since
        if before and sample.desired != before.desired:
            events.append(f"HPA: {before.desired} -> {sample.desired}")
        if before and sample.ready != before.ready:
            events.append(f"{sample.ready} {'pod' if sample.ready == 1 else 'pods'} ready")
        if self.burst_ended is not None and (before is None or before.at - self.began <= self.burst_ended):
            events.append("burst over")
        sample.event = ", ".join(events)


def shown(samples: list[Sample], rows: int) -> list[Sample]:
    """Return the samples for a table of about this many rows: all with changes, the newest, and some in between."""
    noted = [sample for sample in samples if sample.event]
    between = [sample for sample in samples[:-1] if not sample.event]
    room = max(1, rows - len(noted) - 1)
    some = between[:: max(1, -(-len(between) // room))]
    return sorted({id(s): s for s in [*noted, *some, *samples[-1:]]}.values(), key=lambda s: s.at)


def add_client_side(sample: Sample, load: Load) -> None:
    """Add the clients' figures of the last seconds. An answer's tokens count as spread evenly over its time."""
    since = sample.at - WINDOW_SECONDS
    tokens = 0.0
    first: list[float] = []
    for answer in load.answers:
        if answer.first_token_seconds is None:
            continue
        begin = answer.started + answer.first_token_seconds
        end = answer.finished or time.monotonic()
        overlap = min(end, sample.at) - max(begin, since)
        if overlap > 0:
            tokens += answer.tokens * min(1.0, overlap / max(end - begin, 1e-6))
        if since <= begin <= sample.at:
            first.append(answer.first_token_seconds)
    sample.tokens_per_second = tokens / WINDOW_SECONDS
    if first:
        sample.first_token_p50, sample.first_token_p95 = percentile(first, 50), percentile(first, 95)
