"""How the service scales, as a condition and in words: the HPA's own arithmetic, redone to be read. Pure.

Used by `status`. desired = ceil(total / target) for each metric, the larger wins, between minReplicas and
maxReplicas, unless the HPA's tolerance or stabilisation holds it (kubernetes: pkg/controller/podautoscaler).
"""

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from conveyor_api.conditions import Reason
from conveyor_api.quantities import parse_quantity
from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.status import AutoscalingStatus, MetricStatus, clip
from conveyor_operator.observed import AutoscalerState, Observed

_TOLERANCE = Decimal("0.1")  # the HPA's default


@dataclass(frozen=True, slots=True)
class MetricsApi:
    """Who serves custom.metrics.k8s.io. `owner` is `namespace/service` of another one, empty if it is us or nobody."""

    owner: str = ""
    api_service: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one metric asks for."""

    metric: str
    total: int
    target: Decimal
    replicas: int
    within_tolerance: bool

    def __str__(self) -> str:
        target = format(self.target.normalize(), "f")
        return f"{self.metric} {self.total} / {target} -> {self.replicas}"


def judge_scaling(spec: InferenceServiceSpec, observed: Observed, metrics_api: MetricsApi) -> tuple[str, Reason, str]:
    """(status, reason, message) of the condition ScalingReady."""
    if not spec.is_autoscaled:
        return "True", Reason.FIXED_REPLICAS, _explain_fixed(spec, observed)
    if metrics_api.owner:
        return (
            "False",
            Reason.METRICS_API_OWNED_BY_OTHER,
            (
                f"APIService {metrics_api.api_service} belongs to {metrics_api.owner}; Conveyor does not displace it. "
                "The replicas stay as they are. Remove that adapter, or set autoscaling.provider: None."
            ),
        )
    if observed.autoscaler is None:
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, "there is no HorizontalPodAutoscaler yet"
    return _mirror(observed.autoscaler)


def build_scaling_status(spec: InferenceServiceSpec, observed: Observed) -> AutoscalingStatus | None:
    """The metrics as the HPA saw them, and the arithmetic; None without `spec.autoscaling`."""
    if spec.autoscaling is None:
        return None
    autoscaler = observed.autoscaler
    if autoscaler is None:
        return AutoscalingStatus(provider=spec.autoscaling.provider)
    return AutoscalingStatus(
        provider=spec.autoscaling.provider,
        desired_replicas=autoscaler.desired_replicas,
        metrics=[
            MetricStatus(name=name, current=autoscaler.currents.get(name), target=target)
            for name, target in autoscaler.targets.items()
        ],
        message=clip(explain(autoscaler)),
    )


def explain(autoscaler: AutoscalerState) -> str:
    """One line: what each metric asks for, and why the HPA wants what it wants."""
    wishes = find_wishes(autoscaler)
    desired = f"desired {autoscaler.desired_replicas}"
    if not wishes:
        return f"no metric could be read; {desired}, as it was"
    largest = max(wish.replicas for wish in wishes)
    allowed = min(max(largest, autoscaler.min_replicas), autoscaler.max_replicas)
    parts = [str(wish) for wish in wishes]
    if len(wishes) > 1:
        parts.append(f"the larger is {largest}")
    if allowed != largest:
        bound = "maxReplicas" if allowed < largest else "minReplicas"
        parts.append(f"{bound} is {allowed}")
    if allowed != autoscaler.desired_replicas:
        parts.append(_why_held(autoscaler, wishes))
    return "; ".join([*parts, desired])


def find_wishes(autoscaler: AutoscalerState) -> list[Wish]:
    """What each metric that could be read asks for. The HPA reports averages; requests are whole, so is the total."""
    wishes = []
    for name, target_text in autoscaler.targets.items():
        current = autoscaler.currents.get(name)
        if current is None or not target_text:
            continue
        target, average = parse_quantity(target_text), parse_quantity(current)
        total = int((average * max(1, autoscaler.current_replicas)).to_integral_value())
        replicas = int((total / target).to_integral_value(rounding=ROUND_CEILING))
        near = abs(average / target - 1) <= _TOLERANCE
        wishes.append(Wish(name, total, target, replicas, near))
    return wishes


def _why_held(autoscaler: AutoscalerState, wishes: list[Wish]) -> str:
    able = autoscaler.conditions.get("AbleToScale")
    limited = autoscaler.conditions.get("ScalingLimited")
    if able is not None and able[1] in ("ScaleDownStabilized", "ScaleUpStabilized"):
        return f"held: {able[2]}"
    if all(wish.within_tolerance or wish.replicas <= autoscaler.desired_replicas for wish in wishes):
        return "within the tolerance of 10 %, so nothing moves"
    if limited is not None and limited[0] == "True":
        return f"limited: {limited[2]}"
    return "the HorizontalPodAutoscaler has not acted on it yet"


def _explain_fixed(spec: InferenceServiceSpec, observed: Observed) -> str:
    held = observed.deployment.held_replicas.partition(":")[2] if observed.deployment is not None else ""
    if not held:
        return f"replicas is fixed at {spec.replicas}; there is no autoscaler"
    return (
        f"{held} replicas are kept from the time of the autoscaler; "
        f"set spec.replicas to another number than {spec.replicas} to change that"
    )


def _mirror(autoscaler: AutoscalerState) -> tuple[str, Reason, str]:
    for kind, failing in (("AbleToScale", Reason.AUTOSCALER_FAILED), ("ScalingActive", Reason.METRICS_UNAVAILABLE)):
        status, reason, message = autoscaler.conditions.get(kind, ("Unknown", "", ""))
        if status == "Unknown":
            return "Unknown", Reason.WAITING_FOR_AUTOSCALER, "the HorizontalPodAutoscaler has not looked yet"
        if status == "False" and reason == "ScalingDisabled":
            return (
                "False",
                Reason.AUTOSCALER_FAILED,
                (
                    "somebody scaled the Deployment to 0, which pauses the HorizontalPodAutoscaler; "
                    "scale it to 1 to resume"
                ),
            )
        if status == "False":
            return "False", failing, f"{reason}: {message}"
    return "True", Reason.SCALING_ACTIVE, "the HorizontalPodAutoscaler reads the metrics and sets the replicas"
