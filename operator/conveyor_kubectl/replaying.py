"""What the HorizontalPodAutoscaler, or one of another spec, would have made of recorded moments. Pure.

They are what `kubectl conveyor explain NAME -o json` printed, one after the other; the arithmetic is
`conveyor_operator.simulate.hpa`'s. What was in flight stays what it was, however many replicas there are in the replay.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.simulate.hpa import Hpa

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """`recorded` replicas were asked for. A value is None where it could not be read."""

    at: datetime
    values: Mapping[str, int | None]
    recorded: int
    autoscaler: Object


@dataclass(frozen=True, slots=True)
class Look:
    """A moment, and the replicas that the replay had by then."""

    moment: Moment
    replayed: int


def read_moments(text: str) -> Iterator[Moment]:
    """Those at which there was an HPA. Raises ValueError."""
    decoder, number = json.JSONDecoder(), 0
    while text := text.lstrip():
        sample, end = decoder.raw_decode(text)
        text, number = text[end:], number + 1
        try:
            if sample["autoscaler"] is not None:
                yield _read_moment(sample)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"document {number} is none of `explain -o json`: {error!r}") from error


def _read_moment(sample: Object) -> Moment:
    return Moment(
        at=datetime.fromisoformat(sample["at"]),
        values={metric["name"]: metric["value"] for metric in sample["metrics"]},
        recorded=sample["replicas"]["asked"],
        autoscaler={"spec": sample["autoscaler"]},
    )


def build_hpa(service: InferenceService) -> Object:
    """The HPA that the operator would make of it. Raises ValueError where it would make none."""
    period_seconds = PodStarts(service.status).choose_period(service.spec.queue.timeout_seconds)
    owner = build_owner(service.namespace, service.name, "")
    if (hpa := build_autoscaler(owner, service.spec, period_seconds)) is None:
        raise ValueError(f"{service.name} has no autoscaling by Conveyor")
    return hpa


def replay(moments: Iterable[Moment], other: Object | None = None) -> Iterator[Look]:
    """Each moment is a look of the HPA of then, or of the `other`, which begins at the recorded number."""
    hpa, replicas = None, 0
    for moment in moments:
        body = other or moment.autoscaler
        if hpa is None:
            hpa = Hpa(body)
        hpa.apply(body)
        if not (replicas and moment.recorded):  # the beginning, or the operator took it to zero and back
            replicas = moment.recorded
        yield Look(moment, replicas)
        values = {name: moment.values.get(name) for name in hpa.asked.targets}
        replicas = hpa.look(moment.at.timestamp(), replicas, values)
