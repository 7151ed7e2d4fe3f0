"""Explains with one reason and one sentence why a pod does not run. Pure; used by `situation` and `status`.

A user should not have to look at a pod to find out what is wrong. The sources, best first, are the scheduler's
condition, the kubelet's waiting reasons, the end of a container, and the reason of a failed pod.

For a container that ended, the explanation is that it was killed for its memory, or else its termination message. The
engine and the fetch write this message as `{"reason", "message"}`. Without it, the kubelet uses the log's last lines.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from conveyor_api.conditions import Reason
from conveyor_api.names import MODEL_VOLUME
from conveyor_api.text import clip
from conveyor_operator.inferenceservice.pods import ContainerState, PodState, parse_message
from conveyor_operator.inferenceservice.wording import explain_start, to_field_names
from conveyor_protocol.failure_reasons import FailureReason

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_START_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError"}
)
# The kubelet writes this between two attempts, followed by the error of the last attempt.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(?:: \w+: |$)')
# containerd omits the tag if a digest follows.
_TAG = re.compile(r":[^:/@]+(?=@)")
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,99}")
_MOST_OF_A_LOG = 500  # characters; the kubelet keeps up to 2 KiB
_GPU = re.compile(r"Insufficient \S*gpu", re.IGNORECASE)
_NO_CLAIM = re.compile(r'persistentvolumeclaim "([^"]*)" not found', re.IGNORECASE)
# The program is not in the image, or it is built for another processor.
_NO_START = frozenset({"StartError", "ContainerCannotRun"})
_WRONG_IMAGE = re.compile(r"No module named '?(conveyor_engine|vllm)\b|exec format error")
# The reasons of nodes that a pod does not fit however many other pods are removed, and of missing or unbound claims.
_NEVER_FITS = re.compile(
    r"node affinity/selector|untolerated taint|node\(s\) were unschedulable|volume node affinity|"
    r"persistentvolumeclaim|resourceclaim",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"secret \"[^\"]*\" not found|couldn't find key .* in Secret", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PodFailure:
    """One failure. `since`: RFC 3339, "" if unknown. `exit_code`: None if no container ended."""

    reason: str
    message: str
    pod: str
    since: str = ""
    exit_code: int | None = None


def find_failures(pods: Iterable[PodState]) -> list[PodFailure]:
    """Return the failures that keep pods from being ready now, latest first. The order of `pods` does not matter."""
    found = [find_failure(pod) for pod in pods if not pod.leaving and not pod.ready]
    return sorted((f for f in found if f is not None), key=lambda f: (f.since, f.pod), reverse=True)


def find_last_failure(pods: Iterable[PodState]) -> PodFailure | None:
    """Return the latest failure, even if its pod has recovered; None without one."""
    found = [f for pod in pods if not pod.leaving and (f := find_failure(pod, also_past=True))]
    return max(found, key=lambda f: (f.since, f.pod), default=None)


def find_failure(pod: PodState, also_past: bool = False) -> PodFailure | None:
    """Return the failure of one pod. With `also_past`, include failures that a restart has resolved."""
    if pod.unschedulable:
        reason, message = _judge_scheduler(pod)
        return PodFailure(reason, _tidy(message), pod.name, pod.unschedulable_at)
    if pod.lost_at:
        message = f"node {pod.node} has not reported since {pod.lost_at}; its engines may still answer"
        return PodFailure(Reason.NODE_LOST, message, pod.name, pod.lost_at)
    for container in pod.containers:
        failure = _container_failure(pod, container, also_past)
        if failure is not None:
            return failure
    if pod.phase == "Failed":
        # Usually it was evicted, and its ReplicaSet has already created another pod.
        said = pod.reason if _REASON.fullmatch(pod.reason) else "PodFailed"
        return PodFailure(said, _tidy(pod.message or "the pod failed"), pod.name, pod.created_at)
    return None


def may_fit_later(unschedulable: str) -> bool:
    """Return whether a pod waits for room that another pod may leave. unschedulable: the scheduler's message, or ""."""
    without_preemption = unschedulable.partition("preemption:")[0]
    reasons = (without_preemption.partition("available: ")[2] or without_preemption).rstrip(". ").split(", ")
    return bool(unschedulable) and not all(_NEVER_FITS.search(reason) for reason in reasons)


def _judge_scheduler(pod: PodState) -> tuple[Reason, str]:
    claim = _NO_CLAIM.search(pod.unschedulable)
    if claim is not None:
        adapters = [adapter for adapter in pod.mounted_adapters if adapter.claim == claim[1]]
        is_models = not adapters or any(adapter.volume == MODEL_VOLUME for adapter in adapters)
        fields = ["model.uri or model.cache.claimName"] if is_models else []
        fields += ["the uri of the adapters in it"] if adapters else []
        return Reason.CLAIM_NOT_FOUND, (
            f"namespace {pod.namespace} has no PersistentVolumeClaim {claim[1]}; create it, or correct "
            f"{' or '.join(fields)}"
        )
    reason = Reason.INSUFFICIENT_GPU if _GPU.search(pod.unschedulable) else Reason.UNSCHEDULABLE
    return reason, pod.unschedulable


def _container_failure(pod: PodState, container: ContainerState, also_past: bool) -> PodFailure | None:
    said = container.waiting_message
    if container.waiting_reason in _IMAGE_REASONS:
        cause = _BACK_OFF.sub("", said)
        image = pod.model_image if _names(said, pod.model_image) else container.image
        adapter = next((each for each in pod.mounted_adapters if _names(said, each.image)), None)
        if adapter is not None and image != adapter.image:
            image = f"{adapter.image} of adapter {adapter.name}"
        message = f"image {image} cannot be pulled" + (f": {cause}" if cause else "")
        return PodFailure(Reason.IMAGE_PULL_FAILED, _tidy(message), pod.name, pod.created_at)
    if container.waiting_reason in _START_REASONS:
        reason = Reason.SECRET_NOT_FOUND if _NO_SECRET.search(said) else Reason.CONTAINER_CONFIG_INVALID
        where = f" in namespace {pod.namespace}" if said.endswith("not found") else ""
        has_other_images = any(adapter.image for adapter in pod.mounted_adapters)
        cause = explain_start(said, pod.model_image, has_other_images)
        message = f"container {container.title} cannot start: {cause}{where}"
        return PodFailure(reason, _tidy(message), pod.name, pod.created_at)
    recovered = container.ready and not also_past
    done = container.initial and container.exit_code == 0
    if not container.ended or recovered or done:
        return None
    reason, message = _judge_ending(container)
    return PodFailure(reason, _tidy(message), pod.name, container.ended_at, container.exit_code)


def _names(said: str, image: str) -> bool:
    return bool(image) and (image in said or _TAG.sub("", image) in said)


def _judge_ending(container: ContainerState) -> tuple[Reason, str]:
    # Checked first, because an engine whose child process was killed also writes a message.
    if container.ended_reason == FailureReason.OOM_KILLED:
        return Reason.OOM_KILLED, (
            f"container {container.title} used more than its memory limit and was killed; "
            "raise resources.limits.memory, or lower engine.maxModelLen or kvCache"
        )
    reported = _parse_reported(container.ended_message)
    if reported is not None:
        return reported
    last_lines = container.ended_message.strip()
    if len(last_lines) > _MOST_OF_A_LOG:  # the cause usually comes last
        last_lines = f"... {last_lines[-_MOST_OF_A_LOG:]}"
    said = f": {last_lines}" if last_lines else ""
    if container.ended_reason in _NO_START or _WRONG_IMAGE.search(last_lines):
        return Reason.CONTAINER_CONFIG_INVALID, (
            f"container {container.title} cannot run in image {container.image}; correct engine.image{said}"
        )
    return Reason.CRASH_LOOP, f"container {container.title} ended with exit code {container.exit_code}{said}"


def _parse_reported(message: str) -> tuple[Reason, str] | None:
    """Return reason and message from an engine's JSON `{"reason", "message"}`; None for other texts, like log lines."""
    fields = parse_message(message)
    if not isinstance(fields.get("message"), str):
        return None
    reason, said = fields.get("reason"), to_field_names(fields["message"])
    if isinstance(reason, str) and reason in set(FailureReason):
        return Reason(reason), said
    return Reason.ENGINE_ERROR, f"{reason}: {said}"  # an engine of another version


def _tidy(message: str) -> str:
    return clip(" ".join(message.split()))
