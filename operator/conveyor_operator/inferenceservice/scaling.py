"""Explains how the service scales, as a condition and in words, by repeating the HPA's arithmetic. Pure.

The HPA computes ceil(total / target) for each metric and uses the largest result, limited by minReplicas and
maxReplicas. Its tolerance or stabilization may keep the current number (kubernetes: pkg/controller/podautoscaler).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

from conveyor_api import names
from conveyor_api.conditions import Reason
from conveyor_api.quantities import parse_quantity
from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.status import AutoscalingStatus, MetricStatus
from conveyor_api.text import clip
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.keda import judge_keda
from conveyor_operator.inferenceservice.observed import AutoscalerState, Observed
from conveyor_operator.inferenceservice.replicas import is_asleep
from conveyor_operator.metrics_api.answer import MetricsApi

Object = Mapping[str, Any]

_NEVER: Final[Object] = {}
_WOKEN: Final = "Woken"

SCALED: Final = "scaled"
"""The first word of messages about a change of the replicas."""

# The HPA's controller reports this for up to 30 s after an installation, because it caches API discovery that long.
_NO_KIND_YET: Final = f'no matches for kind "{names.KIND}"'
_NOT_LOOKED: Final = "the HorizontalPodAutoscaler has not read its metrics yet"
_LEFT_OUT: Final = (
    "the metrics server is not installed (the chart's value metrics.enabled is false). The replicas do not change. "
    "Set metrics.enabled: true, or autoscaling.provider: External."
)
_NO_API_YET: Final = f"no custom metrics API ({names.METRICS_GROUP}) registered"

SCALES: Final = ("True", Reason.SCALING_ACTIVE, "the HorizontalPodAutoscaler reads the metrics and sets the replicas")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The replicas that follow from one metric. Within the tolerance, that is the current number."""

    metric: str
    total: int
    target: Decimal
    replicas: int
    tolerance: Decimal | None = None
    """The tolerance that keeps the current number; None if the metric is outside it."""

    def __str__(self) -> str:
        target = format(self.target.normalize(), "f")
        text = f"{self.metric} {self.total} / {target} -> {self.replicas}"
        if self.tolerance is None:
            return text
        return f"{text}, within the tolerance of {format((self.tolerance * 100).normalize(), 'f')} %"


def judge_scaling(
    spec: InferenceServiceSpec, observed: Observed, metrics_api: MetricsApi, serves_keda: bool | None = None
) -> tuple[str, Reason, str]:
    """Return (status, reason, message) of the condition ScalingReady."""
    if spec.autoscaling is None:
        return "True", Reason.FIXED_REPLICAS, _explain_fixed(spec, observed)
    if spec.autoscaling.is_external:
        return (
            "True",
            Reason.EXTERNAL_AUTOSCALER,
            "provider is External: an autoscaler that is not Conveyor's sets the replicas",
        )
    found = judge_keda(observed, serves_keda) if spec.autoscaling.uses_keda else _judge_metrics_api(metrics_api)
    judged = found or _judge_autoscaler(spec, observed, metrics_api)
    if metrics_api.left_out and judged[1] == Reason.METRICS_UNAVAILABLE:
        return "False", Reason.METRICS_UNAVAILABLE, _LEFT_OUT
    return judged


def _judge_metrics_api(metrics_api: MetricsApi) -> tuple[str, Reason, str] | None:
    """Return the condition if Conveyor's HPA gets no metrics; None if the HPA's own conditions are to be used."""
    if metrics_api.owner:
        return (
            "False",
            Reason.METRICS_API_OWNED_BY_OTHER,
            (
                f"APIService {metrics_api.api_service} belongs to {metrics_api.owner}; Conveyor does not replace it. "
                "The replicas do not change. Remove that adapter, or set autoscaling.provider: KEDA or External."
            ),
        )
    if metrics_api.missing:
        message = f"custom.metrics.k8s.io is not registered: {metrics_api.missing}. The replicas do not change."
        return "False", Reason.METRICS_UNAVAILABLE, message
    return None


def _judge_autoscaler(
    spec: InferenceServiceSpec, observed: Observed, metrics_api: MetricsApi
) -> tuple[str, Reason, str]:
    """Return the condition that follows from the HPA's own conditions."""
    if observed.autoscaler is None:
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, "the HorizontalPodAutoscaler does not exist yet"
    if is_asleep(spec, observed.deployment):
        return (
            "True",
            Reason.SCALED_TO_ZERO,
            "scaled to zero: the HorizontalPodAutoscaler is paused until a request starts an engine",
        )
    if _was_woken(observed, observed.autoscaler):
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, _NOT_LOOKED
    said = observed.autoscaler.conditions.get("ScalingActive", ("", "", ""))[2]
    if _NO_KIND_YET in said or (metrics_api.registered and _NO_API_YET in said):
        message = "the HorizontalPodAutoscaler's cached list of APIs lacks the metrics; it is refreshed within 30 s"
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, message
    return _mirror(observed.autoscaler)


def build_scaling_status(
    spec: InferenceServiceSpec,
    observed: Observed,
    former: Object = _NEVER,
    activity: Activity = Activity.STEADY,
    places: str = "",
) -> AutoscalingStatus | None:
    """Return the metrics that the HPA read, and its arithmetic.

    former: the previous result. places: the places of starting engines, as words.
    Returns None if the spec has no autoscaling, or an external autoscaler.
    """
    if spec.autoscaling is None or spec.autoscaling.is_external:
        return None
    autoscaler = observed.autoscaler
    if autoscaler is None:
        return AutoscalingStatus()
    if is_asleep(spec, observed.deployment):
        return AutoscalingStatus(desired_replicas=0, reason=Reason.SCALED_TO_ZERO, message="scaled to zero while idle")
    if former.get("reason") == Reason.SCALED_TO_ZERO or _was_woken(observed, autoscaler):
        count = observed.deployment.requested_replicas if observed.deployment else spec.first_replicas
        message = f"{SCALED} 0 -> {count}"
        if activity is Activity.WAITING or former.get("reason") == _WOKEN:
            return AutoscalingStatus(desired_replicas=count, reason=_WOKEN, message=f"{message}: requests are queued")
        return AutoscalingStatus(desired_replicas=count, reason="Pending", message=message)
    reason, message = explain(autoscaler, places)
    return AutoscalingStatus(
        desired_replicas=autoscaler.desired_replicas,
        reason=reason,
        metrics=[
            MetricStatus(name=name, current=autoscaler.currents.get(name), target=target)
            for name, target in autoscaler.targets.items()
        ],
        message=clip(message),
    )


def _was_woken(observed: Observed, autoscaler: AutoscalerState) -> bool:
    """Return whether the service has started from zero and the HPA, which is paused at zero, has not run since."""
    disabled = autoscaler.conditions.get("ScalingActive", ("", "", ""))[1] == "ScalingDisabled"
    return disabled and observed.deployment is not None and observed.deployment.requested_replicas > 0


def keep_decision(former: Object, present: dict[str, Any]) -> dict[str, Any]:
    """Return the former status if the decision is the same, so that a changed metric value alone causes no write."""
    return dict(former) if _decision(former) == _decision(present) else present


def _decision(status: Object) -> Any:
    targets = {metric.get("name"): metric.get("target") for metric in status.get("metrics") or ()}
    return status.get("desiredReplicas"), status.get("reason"), targets


def explain(autoscaler: AutoscalerState, places: str = "") -> tuple[str, str]:
    """Return why the HPA has chosen its number: a reason, and a line with the result of each metric."""
    now, desired = autoscaler.current_replicas, autoscaler.desired_replicas
    decided = f"{SCALED} {now} -> {desired}" if now != desired else f"{desired} replicas"
    proposals = find_proposals(autoscaler)
    if not proposals:
        return "NoMetrics", f"the replicas stay at {desired}: no metric could be read"
    largest = max(proposal.replicas for proposal in proposals)
    allowed = min(max(largest, autoscaler.min_replicas), autoscaler.max_replicas)
    parts = [str(proposal) for proposal in proposals]
    if len(proposals) > 1:
        parts.append(f"the larger is {largest}")
    parts += [f"beyond the requests for which {places}"] * bool(places)
    reason = "Decided"
    if allowed != largest:
        reason, bound = ("AtMaximum", "maxReplicas") if allowed < largest else ("Decided", "minReplicas")
        parts.append(f"{bound} is {allowed}")
    if allowed != desired:
        reason, why = _why_held(autoscaler)
        parts.append(why)
    return reason, f"{decided}: {'; '.join(parts)}"


def find_proposals(autoscaler: AutoscalerState) -> list[Proposal]:
    """Return the result of each metric that could be read.

    The HPA reports averages; totals are rounded to whole requests.
    """
    now, proposals = max(1, autoscaler.current_replicas), []
    for name, target in autoscaler.targets.items():
        current = autoscaler.currents.get(name)
        if current is not None and target:
            total = int((parse_quantity(current) * now).to_integral_value())
            proposals.append(find_proposal(autoscaler, name, total, now))
    return proposals


def find_proposal(autoscaler: AutoscalerState, metric: str, total: int, now: int) -> Proposal:
    """Return the result of one metric. `now`: the current number of replicas, at least 1."""
    target = parse_quantity(autoscaler.targets[metric])
    replicas, ratio = int((total / target).to_integral_value(rounding=ROUND_CEILING)), total / (target * now)
    tolerance = parse_quantity(autoscaler.tolerance_up if ratio > 1 else autoscaler.tolerance_down)
    if replicas != now and abs(ratio - 1) <= tolerance:
        return Proposal(metric, total, target, now, tolerance)
    return Proposal(metric, total, target, replicas)


def _why_held(autoscaler: AutoscalerState) -> tuple[str, str]:
    able = autoscaler.conditions.get("AbleToScale")
    limited = autoscaler.conditions.get("ScalingLimited")
    if able is not None and able[1] in ("ScaleDownStabilized", "ScaleUpStabilized"):
        return "Stabilized", f"held: {able[2]}"
    if limited is not None and limited[0] == "True":
        return "Limited", f"limited: {limited[2]}"
    return "Pending", "the HorizontalPodAutoscaler has not scaled the Deployment yet"


def _explain_fixed(spec: InferenceServiceSpec, observed: Observed) -> str:
    held = observed.deployment.held_replicas if observed.deployment is not None else ""
    if not held:
        return f"the replicas are fixed at {spec.first_replicas}; autoscaling is not set"
    return f"autoscaling was removed; the service keeps its {held} replicas until spec.replicas is set"


def _mirror(autoscaler: AutoscalerState) -> tuple[str, Reason, str]:
    for kind, failing in (("AbleToScale", Reason.AUTOSCALER_FAILED), ("ScalingActive", Reason.METRICS_UNAVAILABLE)):
        status, reason, message = autoscaler.conditions.get(kind, ("Unknown", "", ""))
        if status == "Unknown":
            return "Unknown", Reason.WAITING_FOR_AUTOSCALER, _NOT_LOOKED
        if status == "False" and reason == "ScalingDisabled":
            return (
                "False",
                Reason.AUTOSCALER_FAILED,
                (
                    "someone scaled the Deployment to 0, which pauses the HorizontalPodAutoscaler; "
                    "to resume, scale it to 1"
                ),
            )
        if status == "False":
            return "False", failing, f"{reason}: {message}"
    return SCALES
