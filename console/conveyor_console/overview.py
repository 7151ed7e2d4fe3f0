"""Joins what the operator, the gateways and the engines report about a service to one line of the overview. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from conveyor_api.conditions import ConditionType, Reason
from conveyor_console.figures import Figures
from conveyor_console.requests import NO_REQUESTS, Requests
from conveyor_console.services import Service

_AT_MAXIMUM: Final = "AtMaximum"
# Reasons for which no engine is ready, without any failure. Before the first start, they need nobody's attention.
_STARTING: Final = {Reason.MODEL_DOWNLOADING, Reason.MODEL_LOADING, Reason.PODS_STARTING}


class Trouble(IntEnum):
    """How urgent a service is; the overview begins with the lowest."""

    DOWN = 0
    SLOW = 1
    FULL = 2
    UNKNOWN = 3
    STARTING = 4
    CHANGING = 5
    WELL = 6
    ASLEEP = 7


WORDS: Final = {
    Trouble.DOWN: "Not ready",
    Trouble.SLOW: "Slow",
    Trouble.FULL: "Full",
    Trouble.UNKNOWN: "Unknown",
    Trouble.STARTING: "Starting",
    Trouble.CHANGING: "Changing",
    Trouble.WELL: "Ready",
    Trouble.ASLEEP: "At zero",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One service on the overview. `requests`: None while no gateway has answered."""

    service: Service
    requests: Requests | None
    figures: Figures
    trouble: Trouble
    reason: str

    @property
    def word(self) -> str:
        return WORDS[self.trouble]

    @property
    def fill(self) -> float | None:
        """Share of the places in the batches of ready engines that have a request; None without a ready engine."""
        if self.requests is None or not self.requests.places:
            return None
        return min(1.0, self.requests.at_engines / self.requests.places)

    @property
    def order(self) -> tuple[int, int, str]:
        return self.trouble, -(self.requests.queued if self.requests else 0), self.service.key


def build_line(service: Service, requests: Requests | None, figures: Figures | None) -> Line:
    figures = figures or Figures()
    trouble, reason = _judge(service, requests or NO_REQUESTS, figures)
    return Line(service, requests, figures, trouble, reason)


def _judge(service: Service, requests: Requests, figures: Figures) -> tuple[Trouble, str]:
    """Return how urgent the service is, and why, as a sentence."""
    ready = service.ready
    if ready.status == "False" and ready.reason in _STARTING and not service.last_start:
        return Trouble.STARTING, f"{ready.reason}: {ready.message}"
    if ready.status == "False":
        return Trouble.DOWN, f"{ready.reason}: {ready.message}"
    if ready.status != "True":
        return Trouble.UNKNOWN, ready.message
    if missed := _find_missed(service, figures):
        return Trouble.SLOW, missed
    if service.progressing or service.ready_replicas != service.desired_replicas:
        return Trouble.CHANGING, f"{ready.reason}: {ready.message}"
    if _is_full(service, requests):
        queued = "1 request is" if requests.queued == 1 else f"{requests.queued} requests are"
        return Trouble.FULL, f"{queued} queued, and no more replicas are allowed"
    if not service.desired_replicas:
        return Trouble.ASLEEP, ready.message
    return Trouble.WELL, ready.message


def _is_full(service: Service, requests: Requests) -> bool:
    """Return whether requests are queued and the service may have no more replicas.

    At the maximum, the autoscaler has computed that the service needs more replicas. For a fixed number of replicas,
    nothing computes this. Short queues are normal there, so as many requests must be queued as the engines run at once.
    """
    if service.scaling_reason == _AT_MAXIMUM:
        return requests.queued > 0
    scaling = dict(service.conditions).get(ConditionType.SCALING_READY)
    is_fixed = scaling is not None and scaling.reason == Reason.FIXED_REPLICAS
    return is_fixed and requests.queued >= requests.places > 0


def _find_missed(service: Service, figures: Figures) -> str:
    """Return which objective is missed, as a sentence; "" if none is."""
    measured = (
        ("first token", figures.first_token_seconds, service.first_token_objective),
        ("between tokens", figures.between_tokens_seconds, service.between_tokens_objective),
    )
    for what, seconds, objective in measured:
        if seconds is not None and objective is not None and seconds > objective:
            return f"{what}: {show_seconds(seconds)} at the 95th percentile, the objective is {show_seconds(objective)}"
    return ""


def sort_lines(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with the most urgent service first."""
    return sorted(lines, key=lambda line: line.order)


def show_seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
