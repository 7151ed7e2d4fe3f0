"""Evaluates a HorizontalPodAutoscaler as its controller does. Pure; used by `explaining` and `simulate`.

The arithmetic is from Kubernetes: pkg/controller/podautoscaler/horizontal.go for Object metrics with `AverageValue`.
tests/cli/insight compares this module with the real controller. Times are in seconds on any clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conveyor_api.autoscaling import Behavior, ScalingPolicy, ScalingRules
from conveyor_insight.rates import Change, limit_down, limit_up
from conveyor_operator.inferenceservice.observed import observe_autoscaler
from conveyor_operator.inferenceservice.scaling import Proposal, find_proposal

# The API server's defaults for fields that a `behavior` does not set (pkg/apis/autoscaling/v2/defaults.go).
_DEFAULT_UP: Final = ScalingRules(
    stabilization_window_seconds=0,
    policies=[
        ScalingPolicy(type="Pods", value=4, period_seconds=15),
        ScalingPolicy(type="Percent", value=100, period_seconds=15),
    ],
)
_DEFAULT_DOWN: Final = ScalingRules(policies=[ScalingPolicy(type="Percent", value=100, period_seconds=15)])


@dataclass(frozen=True, slots=True)
class Controller:
    """Flags of kube-controller-manager, with their defaults."""

    sync_period_seconds: float = 15
    downscale_stabilization_seconds: int = 300


class Hpa:
    """One HPA and the memory of its controller. `body`: the HPA as the operator applies it."""

    def __init__(self, body: Mapping[str, Any], controller: Controller = Controller()) -> None:
        self._down_window_seconds = controller.downscale_stabilization_seconds
        self.apply(body)
        self._desired: list[Change] = []
        self._ups: list[Change] = []
        self._downs: list[Change] = []

    def apply(self, body: Mapping[str, Any]) -> None:
        """Change the HPA. The controller's memory is kept."""
        self.observed = observe_autoscaler(body)
        behavior = body["spec"].get("behavior")
        self.rules = None if behavior is None else self._fill(Behavior.model_validate(behavior))

    def look(self, now: float, replicas: int, values: Mapping[str, int | None]) -> int:
        """Evaluate the HPA once and return the new replicas. `values`: None for a metric that could not be read."""
        proposal = self.proposal(replicas, values)
        desired = self.limit(now, replicas, proposal)
        self.note(now, replicas, proposal, desired)
        return desired

    def proposal(self, replicas: int, values: Mapping[str, int | None]) -> int | None:
        """Return the most replicas that a metric calls for; None if the HPA would not act.

        The HPA does not act if no metric was read, or if a metric is missing and the others call for fewer replicas.
        """
        return self.choose(replicas, self.find_proposals(replicas, values))

    def find_proposals(self, existing: int, values: Mapping[str, int | None]) -> list[Proposal]:
        """Return the result of each metric that was read. `existing`: the number of pods, ready or not."""
        known = {name: value for name in self.observed.targets if (value := values[name]) is not None}
        return [find_proposal(self.observed, name, value, max(1, existing)) for name, value in known.items()]

    def choose(self, replicas: int, proposals: Sequence[Proposal]) -> int | None:
        """Return the largest number of replicas among `proposals`; None in the same cases as `proposal`."""
        largest = max((proposal.replicas for proposal in proposals), default=None)
        if largest is None or (len(proposals) < len(self.observed.targets) and largest < replicas):
            return None
        return largest

    def limit(self, now: float, replicas: int, proposal: int | None) -> int:
        """Return the replicas after stabilization, policies and limits are applied to `proposal`."""
        low, high = self.observed.min_replicas, self.observed.max_replicas
        if replicas == 0:
            return 0
        if not low <= replicas <= high:
            return min(max(replicas, low), high)
        if proposal is None:
            return replicas
        if self.rules is None:
            highest = max([proposal, low, *self._past(now, replicas, self._down_window_seconds)])
            return min(highest, high, max(2 * replicas, 4))
        return self._limit_by(*self.rules, now, replicas, proposal)

    def note(self, now: float, replicas: int, proposal: int | None, desired: int) -> None:
        """Record an evaluation. Windows and policies use it in later evaluations."""
        self._desired = self._desired or [Change(now, replicas)]
        if proposal is not None:
            self._desired.append(Change(now, proposal))
        if desired != replicas:
            (self._ups if desired > replicas else self._downs).append(Change(now, abs(desired - replicas)))

    def _limit_by(self, up: ScalingRules, down: ScalingRules, now: float, replicas: int, proposal: int) -> int:
        least = min([proposal, *self._past(now, replicas, up.stabilization_window_seconds or 0)])
        most = max([proposal, *self._past(now, replicas, down.stabilization_window_seconds or 0)])
        stable = min(max(replicas, least), most)
        if stable > replicas:
            allowed = max(limit_up(up, now, replicas, self._ups, self._downs), replicas)
            return min(stable, self.observed.max_replicas, allowed)
        if stable < replicas:
            allowed = min(limit_down(down, now, replicas, self._ups, self._downs), replicas)
            return max(stable, self.observed.min_replicas, allowed)
        return replicas

    def _past(self, now: float, replicas: int, window_seconds: float) -> list[int]:
        """Return the proposals within the window; before the first evaluation, the current replicas."""
        past = self._desired or [Change(now, replicas)]
        return [proposal.number for proposal in past if proposal.at > now - window_seconds]

    def _fill(self, behavior: Behavior) -> tuple[ScalingRules, ScalingRules]:
        """Return the rules for scaling up and down, filled with the defaults of API server and controller."""
        down = _merge(behavior.scale_down, _DEFAULT_DOWN)
        if down.stabilization_window_seconds is None:
            down = down.model_copy(update={"stabilization_window_seconds": self._down_window_seconds})
        return _merge(behavior.scale_up, _DEFAULT_UP), down


def _merge(rules: ScalingRules | None, defaults: ScalingRules) -> ScalingRules:
    """Fill unset fields with defaults. The list of policies counts as one field."""
    given = {} if rules is None else {name: value for name, value in rules if value is not None}
    return defaults.model_copy(update=given)
