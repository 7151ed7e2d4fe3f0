"""Replays recorded moments with the recorded HorizontalPodAutoscaler, or with one built from another spec. Pure.

The moments are successive outputs of `kubectl conveyor explain NAME -o json`. `conveyor_insight.hpa` has the
arithmetic. The replay uses the recorded metrics even when its own replicas differ from the recorded replicas. For
another spec, it computes them from the recorded requests and the recorded ready and starting engines.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from conveyor_api import names
from conveyor_api.quantities import parse_quantity
from conveyor_api.resource import InferenceService
from conveyor_insight.hpa import Hpa
from conveyor_metrics.starting import Engines, count_in_flight, count_queue_depth
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from conveyor_operator.inferenceservice.starts import PodStarts

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """One recorded moment. `recorded`: the desired replicas. A value is None if its metric could not be read."""

    at: datetime
    values: Mapping[str, int | None]
    recorded: int
    rules: "Rules"
    counts: "Counts | None" = None
    """None at zero, in a record of an earlier release, or if a count could not be read."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Recorded counts of requests and engines."""

    requests: int
    waiting: int
    ready: int
    starting: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The HPA's spec, and the operator's rules for scaling to zero and from zero to `first_replicas`."""

    autoscaler: Object
    idle_timeout_seconds: float | None = None
    first_replicas: int = 1
    batch_size: int | None = None
    """None for recorded rules, whose metrics are recorded."""


@dataclass(frozen=True, slots=True)
class Look:
    """A moment, and the number of replicas in the replay at that moment."""

    moment: Moment
    replayed: int


def read_moments(text: str) -> Iterator[Moment]:
    """Yield the recorded moments that had an HPA. Raises ValueError."""
    decoder, number = json.JSONDecoder(), 0
    while text := text.lstrip():
        sample, end = decoder.raw_decode(text)
        text, number = text[end:], number + 1
        try:
            if sample["autoscaler"] is not None:
                yield _read_moment(sample)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"document {number} is not from `explain -o json`: {error!r}") from error


def _read_moment(sample: Object) -> Moment:
    return Moment(
        at=datetime.fromisoformat(sample["at"]),
        values={metric["name"]: metric["value"] for metric in sample["metrics"]},
        recorded=sample["replicas"]["asked"],
        rules=Rules({"spec": sample["autoscaler"]}, sample.get("idleTimeoutSeconds")),
        counts=_read_counts(sample),
    )


def _read_counts(sample: Object) -> Counts | None:
    counts, replicas = sample.get("requests"), sample["replicas"]
    return counts and Counts(counts["all"], counts["waiting"], replicas["ready"], replicas["starting"])


def build_rules(service: InferenceService) -> Rules:
    """Build the rules of the HPA that the operator would create. Raises ValueError if it would create none."""
    period_seconds = PodStarts(service.status).choose_period(service.spec.queue.timeout_seconds)
    owner = build_owner(service.namespace, service.name, "")
    hpa, autoscaling = build_autoscaler(owner, service.spec, period_seconds), service.spec.autoscaling
    if hpa is None or autoscaling is None:
        raise ValueError(
            f"{service.name} has no autoscaler of Conveyor's: set spec.autoscaling, with another provider than External"
        )
    batch_size = service.batching.effective_batch_size
    return Rules(hpa, autoscaling.idle_timeout_seconds, service.spec.first_replicas, batch_size)


def replay(moments: Iterable[Moment], other: Rules | None = None) -> Iterator[Look]:
    """Evaluate the recorded HPA, or the HPA of `other`, once for each moment, starting with the recorded replicas.

    With the recorded rules, the service is at zero at each moment that was recorded at zero. With other rules that have
    an idle timeout, the service scales to zero after that time without requests. It scales up again at the first moment
    with requests.
    """
    hpa, replicas, idle_since = None, 0, None
    for moment in moments:
        rules, at = other or moment.rules, moment.at.timestamp()
        if hpa is None:
            hpa, replicas = Hpa(rules.autoscaler), moment.recorded
        hpa.apply(rules.autoscaler)
        idle_since = (at if idle_since is None else idle_since) if _is_idle(moment) else None
        if other is not None:
            replicas = _follow_requests(other, moment, replicas, None if idle_since is None else at - idle_since)
        elif not (replicas and moment.recorded):  # the operator scaled the service to or from zero
            replicas = moment.recorded
        yield Look(moment, replicas)
        replicas = hpa.look(at, replicas, _find_values(moment, rules, hpa, replicas))


def _find_values(moment: Moment, rules: Rules, hpa: Hpa, replicas: int) -> dict[str, int | None]:
    """Return the recorded metrics; with another spec, as the metrics server would have counted them for it."""
    values = {name: moment.values.get(name) for name in hpa.asked.targets}
    counts = moment.counts
    if rules.batch_size is None or counts is None or not counts.starting or None in values.values():
        return values
    targets = (
        float(parse_quantity(hpa.asked.targets[each])) for each in (names.IN_FLIGHT_METRIC, names.QUEUE_DEPTH_METRIC)
    )
    engines = Engines(rules.batch_size, counts.ready, counts.starting, replicas, *targets)
    return {
        names.IN_FLIGHT_METRIC: count_in_flight(counts.requests, counts.waiting, engines),
        names.QUEUE_DEPTH_METRIC: count_queue_depth(counts.waiting, engines),
    }


def _is_idle(moment: Moment) -> bool:
    """Return whether all metrics are 0. A service with an unread metric is not idle, as in the operator."""
    return all(value == 0 for value in moment.values.values())


def _follow_requests(rules: Rules, moment: Moment, replicas: int, idle_seconds: float | None) -> int:
    """Return the replicas after the operator has scaled the service up from zero, or down to zero if it is idle."""
    timeout_seconds = rules.idle_timeout_seconds
    if replicas == 0:
        wakes = timeout_seconds is None or any(moment.values.values())
        return rules.first_replicas if wakes else 0
    if timeout_seconds is not None and idle_seconds is not None and idle_seconds >= timeout_seconds:
        return 0
    return replicas
