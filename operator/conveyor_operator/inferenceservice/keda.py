"""Explains why KEDA does not scale a service, if KEDA's HPA cannot explain it yet. Pure; used by `scaling`."""

from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.observed import Observed

_NOT_INSTALLED = (
    "KEDA is not installed: the cluster has no kind ScaledObject (keda.sh/v1alpha1). The replicas do not change. "
    "Install KEDA (Conveyor finds it within a minute), or set autoscaling.provider: Native."
)
_NOT_TAKEN_UP = (
    "KEDA has not processed the ScaledObject yet. If this lasts, check that the Deployment keda-operator runs and "
    "watches this namespace."
)
_UNREADABLE = "TriggerError"  # KEDA's reason for Ready if it could read no metric


def judge_keda(observed: Observed, served: bool | None) -> tuple[str, Reason, str] | None:
    """Return (status, reason, message) of the condition ScalingReady; None if the HPA's conditions are to be used."""
    if served is None:
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, "Conveyor has not checked yet whether KEDA is installed"
    if not served:
        return "False", Reason.KEDA_NOT_INSTALLED, _NOT_INSTALLED
    if observed.scaled_object is None:
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, "the ScaledObject does not exist yet"
    ready, paused = (observed.scaled_object.get(type, ("Unknown", "", "")) for type in ("Ready", "Paused"))
    if paused[0] == "True":
        message = "the ScaledObject is paused; to resume, remove its annotations autoscaling.keda.sh/paused*"
        return "False", Reason.AUTOSCALER_FAILED, message
    if ready[0] == "False":
        reason = Reason.METRICS_UNAVAILABLE if ready[1] == _UNREADABLE else Reason.AUTOSCALER_FAILED
        return "False", reason, f"{ready[1]}: {ready[2]}"
    if ready[0] == "Unknown" and observed.autoscaler is None:
        return "Unknown", Reason.WAITING_FOR_AUTOSCALER, _NOT_TAKEN_UP
    return None
