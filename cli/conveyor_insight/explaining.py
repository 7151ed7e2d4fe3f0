"""Explains a service's number of replicas, and what its HorizontalPodAutoscaler does next. Pure.

`conveyor_insight.hpa` has the arithmetic. The controller's history of earlier evaluations cannot be read, so two
assumptions replace it. Each stabilization window of `behavior` is assumed to start now. If the HPA reports that its
policies limit it, no further step is assumed before the longest period of these policies ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

from conveyor_api.autoscaling import ScalingRules
from conveyor_api.conditions import ConditionType
from conveyor_api.quantities import parse_quantity
from conveyor_insight.facts import ClassFacts, Counts, Facts, LimitFacts
from conveyor_insight.hpa import Hpa
from conveyor_insight.starting import count_starting, describe_starting
from conveyor_operator.inferenceservice.observed import DeploymentState
from conveyor_operator.inferenceservice.replicas import is_asleep, may_sleep
from conveyor_operator.inferenceservice.scaling import Proposal


class DecisionReason(StrEnum):
    """The reason for the number of replicas."""

    AT_TARGET = "AtTarget"
    WITHIN_TOLERANCE = "WithinTolerance"
    SCALES_UP = "ScalesUp"
    SCALES_DOWN = "ScalesDown"
    AT_MAXIMUM = "AtMaximum"
    AT_MINIMUM = "AtMinimum"
    OUT_OF_BOUNDS = "OutOfBounds"
    STABILIZED = "Stabilized"
    LIMITED = "Limited"
    NO_METRICS = "NoMetrics"
    SCALED_TO_ZERO = "ScaledToZero"
    PAUSED = "Paused"
    NO_AUTOSCALER = "NoAutoscaler"
    FIXED_REPLICAS = "FixedReplicas"
    OTHER_AUTOSCALER = "OtherAutoscaler"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the HPA. `ratio`: value / (target x existing pods).

    If the metric was not read, `problem` says why, and the fields from `value` to `replicas` are None.
    """

    name: str
    target: Decimal
    value: int | None = None
    ratio: Decimal | None = None
    tolerance: Decimal | None = None
    replicas: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The desired replicas after the HPA's next evaluation, and the reason."""

    replicas: int
    reason: DecisionReason
    sentence: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a service's replicas. `sentences`: the decision's sentence comes first.

    autoscaler: the spec of Conveyor's HPA. bounds: the minimum and maximum number of replicas. The minimum is 0 if the
    operator may scale the service to zero, although an HPA's own minimum is at least 1.
    """

    at: datetime
    namespace: str
    name: str
    asked: int
    existing: int
    ready: int
    starting: int
    """Desired pods that are not ready, without those that fail to start."""
    bounds: tuple[int, int] | None
    metrics: tuple[Metric, ...]
    desired: int
    reason: DecisionReason
    sentences: tuple[str, ...]
    autoscaler: Mapping[str, Any] | None
    idle_timeout_seconds: float | None = None
    """How long the service must be idle before it scales to zero; None if it never does."""
    classes: tuple[ClassFacts, ...] = ()
    batch_size: int = 0
    limits: LimitFacts | None = None
    """None for a service without `batching.objectives`."""
    counts: Counts | None = None


_NO_DEPLOYMENT: Final = DeploymentState(requested_replicas=0)


def explain(facts: Facts) -> Explanation:
    deployment = facts.deployment or _NO_DEPLOYMENT
    hpa = None if facts.autoscaler is None else Hpa(facts.autoscaler)
    proposals = [] if hpa is None else hpa.find_proposals(deployment.replicas, _known(facts.values, hpa))
    decision = _decide_without_metrics(facts, deployment) or _decide(facts, hpa, deployment, proposals)
    metrics = (
        []
        if hpa is None
        else [_describe_metric(hpa, name, deployment, facts, proposals) for name in hpa.observed.targets]
    )
    return Explanation(
        at=facts.now,
        namespace=facts.service.namespace,
        name=facts.service.name,
        asked=deployment.requested_replicas,
        existing=deployment.replicas,
        ready=deployment.ready_replicas,
        starting=count_starting(facts),
        bounds=None if hpa is None else (_find_fewest(facts, hpa), hpa.observed.max_replicas),
        metrics=tuple(metrics),
        desired=decision.replicas,
        reason=decision.reason,
        sentences=(decision.sentence, *_add_sentences(facts, hpa, deployment, decision)),
        autoscaler=None if facts.autoscaler is None else facts.autoscaler["spec"],
        idle_timeout_seconds=_find_idle_timeout(facts),
        classes=facts.classes,
        batch_size=facts.service.batching.effective_batch_size,
        limits=facts.limits,
        counts=facts.counts,
    )


def _find_fewest(facts: Facts, hpa: Hpa) -> int:
    return 0 if may_sleep(facts.service.spec) else hpa.observed.min_replicas


def _find_idle_timeout(facts: Facts) -> float | None:
    autoscaling = facts.service.spec.autoscaling
    return None if autoscaling is None else autoscaling.idle_timeout_seconds


def _known(values: Mapping[str, int | str], hpa: Hpa) -> dict[str, int | None]:
    return {name: value if isinstance(value := values.get(name), int) else None for name in hpa.observed.targets}


def _decide_without_metrics(facts: Facts, deployment: DeploymentState) -> Decision | None:
    """Return the decision if the autoscaler reads no metrics, otherwise None."""
    spec, given = facts.service.spec, deployment.requested_replicas
    if facts.deployment is None:
        return Decision(0, DecisionReason.NO_AUTOSCALER, "There is no Deployment yet.")
    is_others = spec.autoscaling is None or spec.autoscaling.is_external
    if is_others and facts.others:
        text = f"HorizontalPodAutoscaler {facts.others[0]}, which Conveyor did not create, sets the replicas."
        return Decision(given, DecisionReason.OTHER_AUTOSCALER, text)
    if spec.autoscaling is not None and is_others:
        text = "With provider: External and no HorizontalPodAutoscaler for the Deployment, the replicas do not change."
        return Decision(given, DecisionReason.OTHER_AUTOSCALER, text)
    if spec.autoscaling is None:
        kept = ", the last number of the autoscaler that was removed" if deployment.held_replicas else ""
        return Decision(
            given, DecisionReason.FIXED_REPLICAS, f"Autoscaling is off: the replicas are fixed at {given}{kept}."
        )
    if is_asleep(spec, deployment):
        text = (
            f"Scaled to zero: no request arrived for {_find_idle_timeout(facts):g} s (autoscaling.idleTimeout). "
            "The next request starts an engine."
        )
        return Decision(0, DecisionReason.SCALED_TO_ZERO, text)
    if given == 0:
        text = "Someone scaled the Deployment to 0, which pauses the HorizontalPodAutoscaler. To resume, scale it to 1."
        return Decision(0, DecisionReason.PAUSED, text)
    return None


def _decide(facts: Facts, hpa: Hpa | None, deployment: DeploymentState, proposals: Sequence[Proposal]) -> Decision:
    given = deployment.requested_replicas
    if hpa is None:
        return Decision(
            given, DecisionReason.NO_AUTOSCALER, "Conveyor has not created the HorizontalPodAutoscaler yet."
        )
    low, high = hpa.observed.min_replicas, hpa.observed.max_replicas
    proposal = hpa.choose(given, proposals)
    desired, bounded = hpa.limit(0.0, given, proposal), min(max(proposal or 0, low), high)
    if not low <= given <= high:
        text = f"The {given} replicas are not between {low} and maxReplicas {high}; the HPA corrects that first."
        return Decision(desired, DecisionReason.OUT_OF_BOUNDS, text)
    if proposal is None:
        return Decision(given, DecisionReason.NO_METRICS, _describe_missing_metrics(proposals))
    if bounded != given and (used_up := _find_used_up(hpa, facts, given, bounded)):
        return used_up
    if desired != bounded:
        return _describe_held(hpa, given, bounded, desired)
    if proposal < desired and (idle_timeout_seconds := _find_idle_timeout(facts)) is not None:
        text = (
            f"The metrics call for {proposal} replicas; the HorizontalPodAutoscaler keeps {desired}. After "
            f"{idle_timeout_seconds:g} s without a request (autoscaling.idleTimeout) the operator scales to zero. "
            "The next request starts an engine."
        )
        return Decision(desired, DecisionReason.AT_MINIMUM, text)
    return _describe_decision(hpa, given, proposal, desired, proposals)


def _describe_missing_metrics(proposals: Sequence[Proposal]) -> str:
    if not proposals:
        return "No metric can be read, so the replicas do not change."
    return (
        "A metric cannot be read, and the others call for fewer replicas. "
        "The HorizontalPodAutoscaler does not scale down while a metric is missing."
    )


def _describe_held(hpa: Hpa, given: int, bounded: int, desired: int) -> Decision:
    """Explain a change that the window or the policies of `behavior` hold back."""
    rules, direction = _rules_towards(hpa, given, bounded)
    if rules is None or (rules.stabilization_window_seconds and desired == given):
        window = 300 if rules is None else rules.stabilization_window_seconds
        order = "largest" if direction == "scaleDown" else "smallest"
        text = (
            f"The metrics call for {bounded} replicas now; {direction} uses the {order} number of the last {window} s "
            f"(behavior.{direction}.stabilizationWindowSeconds)."
        )
        return Decision(desired, DecisionReason.STABILIZED, text)
    return Decision(
        desired,
        DecisionReason.LIMITED,
        f"The metrics call for {bounded} replicas; {_describe_policies(rules, direction)}.",
    )


def _find_used_up(hpa: Hpa, facts: Facts, given: int, bounded: int) -> Decision | None:
    """Return the decision if the controller reports that its policies do not allow a step yet; otherwise None."""
    rules, direction = _rules_towards(hpa, given, bounded)
    status, word, _ = hpa.observed.conditions.get("ScalingLimited", ("", "", ""))
    if rules is None or (status, word) != ("True", "ScaleUpLimit" if bounded > given else "ScaleDownLimit"):
        return None
    since = _seconds_since_change(facts)
    longest = max((policy.period_seconds for policy in rules.policies or ()), default=0)
    if since is None or since >= longest:
        return None
    policies = f"{_describe_policies(rules, direction)}, and the last change was {since:.0f} s ago"
    text = f"The metrics call for {bounded} replicas; {policies}."
    return Decision(given, DecisionReason.LIMITED, text)


def _seconds_since_change(facts: Facts) -> float | None:
    at = ((facts.autoscaler or {}).get("status") or {}).get("lastScaleTime")
    return None if at is None else (facts.now - datetime.fromisoformat(at)).total_seconds()


def _rules_towards(hpa: Hpa, given: int, bounded: int) -> tuple[ScalingRules | None, str]:
    up, down = hpa.rules or (None, None)
    return (up, "scaleUp") if bounded > given else (down, "scaleDown")


def _describe_policies(rules: ScalingRules, direction: str) -> str:
    if rules.select_policy == "Disabled":
        return f"behavior.{direction} is disabled"
    units = {"Pods": "pods", "Percent": "%"}
    each = [f"{one.value} {units[one.type]} within {one.period_seconds} s" for one in rules.policies or ()]
    which = "the smaller of " if rules.select_policy == "Min" and len(each) > 1 else ""
    return f"behavior.{direction} allows {which}{(' and ' if which else ' or ').join(each)}"


def _describe_decision(hpa: Hpa, given: int, proposal: int, desired: int, proposals: Sequence[Proposal]) -> Decision:
    if proposal > desired:
        return Decision(
            desired, DecisionReason.AT_MAXIMUM, f"The metrics call for {proposal} replicas; maxReplicas is {desired}."
        )
    if proposal < desired:
        return Decision(
            desired, DecisionReason.AT_MINIMUM, f"The metrics call for {proposal} replicas; minReplicas is {desired}."
        )
    winner = max(proposals, key=lambda each: each.replicas)
    won = f"{winner.metric} calls for {'the most' if len(proposals) > 1 else 'this number'}"
    if desired != given:
        reason = DecisionReason.SCALES_UP if desired > given else DecisionReason.SCALES_DOWN
        return Decision(desired, reason, f"Scales from {given} to {desired} replicas: {won}.")
    if winner.tolerance is not None:
        text = f"{winner.metric} is within {_percent(winner.tolerance)} of its target, so the replicas stay."
        return Decision(desired, DecisionReason.WITHIN_TOLERANCE, text)
    return Decision(desired, DecisionReason.AT_TARGET, f"The {desired} replicas stay: {won}.")


def _percent(share: Decimal) -> str:
    return f"{format((share * 100).normalize(), 'f')} %"


def _describe_metric(
    hpa: Hpa, name: str, deployment: DeploymentState, facts: Facts, proposals: Sequence[Proposal]
) -> Metric:
    target, value = parse_quantity(hpa.observed.targets[name]), facts.values.get(name, "the metric was not read")
    if isinstance(value, str):
        return Metric(name, target, problem=value)
    ratio = value / (target * max(1, deployment.replicas))
    tolerance = parse_quantity(hpa.observed.tolerance_up if ratio > 1 else hpa.observed.tolerance_down)
    replicas = next(proposal.replicas for proposal in proposals if proposal.metric == name)
    return Metric(name, target, value, ratio, tolerance, replicas)


def _add_sentences(facts: Facts, hpa: Hpa | None, deployment: DeploymentState, decision: Decision) -> list[str]:
    """Return further sentences about the decision."""
    more, given = [], deployment.requested_replicas
    if hpa is not None and facts.others:
        other = f"HorizontalPodAutoscaler {facts.others[0]}, which Conveyor did not create, scales the same Deployment."
        more.append(f"{other} Delete it, or set autoscaling.provider: External.")
    if hpa is not None and given and not hpa.observed.conditions:
        more.append("The HorizontalPodAutoscaler has not read its metrics yet.")
    elif hpa is not None and 0 < given != hpa.observed.desired_replicas == decision.replicas:
        more.append("The HorizontalPodAutoscaler has decided this; the Deployment does not have the new number yet.")
    elif hpa is not None and given and decision.replicas != hpa.observed.desired_replicas:
        said = hpa.observed.desired_replicas
        more.append(f"The HorizontalPodAutoscaler last decided on {said}; it decides every 15 s by default.")
    if hpa is not None and (places := describe_starting(facts)):
        more.append(places)
    if deployment.ready_replicas < given:
        message = _condition(facts, ConditionType.WORKLOAD_READY)
        ready = f"{deployment.ready_replicas} of {given} pods are ready"
        more.append(f"{ready}{message or '.'} The arithmetic counts all {given}.")
    if message := _condition(facts, ConditionType.SCALING_READY):
        more.append(f"ScalingReady is not True{message}")
    return more


def _condition(facts: Facts, type: ConditionType) -> str:
    """Return reason and message of a condition as the end of a sentence; "" if the condition is True or missing."""
    found = next((each for each in facts.service.status.conditions if each.type == type), None)
    if found is None or found.status == "True":
        return ""
    return f" ({found.reason}: {facts.service.status.find_message(found)})."
