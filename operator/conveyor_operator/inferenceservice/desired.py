"""The desired children of an InferenceService, built once in each reconcile. Pure; read by `plan` and `case`.

The pod template and the engine's configuration are rendered only here, because the image depends on the template.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from conveyor_api import names
from conveyor_api.pod import Metadata
from conveyor_api.queue import Queue, RequestClass
from conveyor_api.resource import InferenceService
from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.status import EffectiveStatus, QueueClassStatus
from conveyor_kube.issuer import Issuer
from conveyor_operator.inferenceservice.check import judge_check
from conveyor_operator.inferenceservice.gap import find_gap_end
from conveyor_operator.inferenceservice.image import choose_engine_image, hash_template
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.inferenceservice.manifests.adapters import build_adapter_list
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler, build_disruption_budget
from conveyor_operator.inferenceservice.manifests.callers import build_callers, with_callers
from conveyor_operator.inferenceservice.manifests.check import build_check
from conveyor_operator.inferenceservice.manifests.config import build_config_map, build_engine_config
from conveyor_operator.inferenceservice.manifests.deployment import build_deployment, build_restored
from conveyor_operator.inferenceservice.manifests.keda import build_scaled_object
from conveyor_operator.inferenceservice.manifests.model import build_claim, needs_claim
from conveyor_operator.inferenceservice.manifests.network import Network, build_network_policy
from conveyor_operator.inferenceservice.manifests.pods import build_pod_template
from conveyor_operator.inferenceservice.manifests.prewarm import build_prewarm
from conveyor_operator.inferenceservice.manifests.resources import describe_resources
from conveyor_operator.inferenceservice.manifests.services import (
    build_engine_service,
    build_public_service,
    build_service_account,
)
from conveyor_operator.inferenceservice.manifests.tls import with_tls
from conveyor_operator.inferenceservice.observed import ClaimModes, DeploymentState, Observed
from conveyor_operator.inferenceservice.rollback import Verdict, find_rolled_back, judge_rollout
from conveyor_operator.inferenceservice.rollout import Rollout, plan_rollout
from conveyor_operator.inferenceservice.starting import count_starting, find_lapse, find_next_end
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.kinds import CLAIM
from conveyor_operator.loop.child import hash_of
from conveyor_operator.loop.owner import Object, Owner
from conveyor_operator.settings import Settings
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS, MAX_OFFSET_SECONDS


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired children. The Deployment lacks `replicas`, which `plan` sets. `effective` is for the status."""

    owner: Owner
    spec: InferenceServiceSpec
    effective: EffectiveStatus
    children: tuple[Object, ...]
    template_hash: str
    """Hash of the pod template, including its image."""
    rollout: Rollout
    """How the Deployment replaces pods."""
    check_job: Object | None = None
    """The child that tries the image and configuration of the new pods before an old pod is removed; None without."""
    attempt: str = ""
    """Identifies the rollout of this spec. One that has failed for good is not tried again."""
    verdict: Verdict = field(default_factory=Verdict)
    """Whether the rollout has failed for good."""
    look_again_at: datetime | None = None
    """When the desired children or the status may change without an event; None if they do not."""
    starting_replicas: int = 0
    """Pods that are expected to be ready soon."""
    starting_until: datetime | None = None
    """When this number lapses, unless the operator writes another time."""


def build_owner(namespace: str, name: str, uid: str, given: Metadata = Metadata()) -> Owner:  # noqa: B008 (frozen)
    """Return the owner of a service's children. given: the labels and annotations that the spec adds to all of them."""
    labels = names.child_labels(name)
    return Owner(INFERENCE_SERVICE, namespace, name, uid, labels, given.labels, given.annotations)


def build_desired(
    service: InferenceService,
    settings: Settings,
    observed: Observed,
    pod_starts: PodStarts,
    now: datetime,
    from_profile: Sequence[str] = (),
    serves_keda: bool | None = True,
    claim_modes: ClaimModes | None = None,
    former_template: Object | None = None,
    issuer: Issuer | None = None,
) -> Desired:
    """Build the desired children from the spec.

    From `observed` it reads values that must not change: the claim's access mode, and the engine image during an
    upgrade of Conveyor. It also reads the state on which the rollout parameters depend if the spec does not set them.
    from_profile: paths of the fields that a profile has filled. serves_keda: if not True, no ScaledObject is built.
    claim_modes: as for `plan_rollout`. former_template: the pod template to restore if the rollout has failed for good;
    None if it was not read yet. issuer: of the tokens that engines accept; None: engines answer everyone.
    """
    spec = service.spec
    owner = build_owner(service.namespace, service.name, service.metadata.uid, spec.metadata)
    config = build_engine_config(owner, spec, settings.has_ipv6)
    template = build_pod_template(owner, spec, config, settings.user_id, settings.cluster_domain)
    has_tls = bool(settings.engine_tls_secret)  # of the engines, and then of the gateway
    if has_tls:
        template = with_tls(template, settings.engine_tls_secret, spec.runtime)
    issuer = issuer if spec.runtime == "Conveyor" else None  # vLLM verifies no tokens
    if issuer is not None:
        template = with_callers(template, owner)
    image = choose_engine_image(spec, template, settings.engine_image, observed.deployment)
    template_hash = hash_template(template, image)
    access_mode = _choose_access_mode(spec, owner, observed) if needs_claim(spec) else None
    made = (names.model_claim_name(owner.name), access_mode) if access_mode is not None else None
    rollout, check_job = plan_rollout(spec, made, claim_modes, observed, now), None
    attempt = hash_of([template_hash, None if spec.rollout.is_open else spec.rollout.given])
    proven = service.status.tried_template or ""
    verdict = judge_rollout(observed, template_hash, attempt, proven, now)
    if _removes_engine(rollout, observed.deployment, template_hash, attempt):
        check_job = build_check(owner, template, image, spec.runtime)
        check = judge_check(check_job, observed, now)
        check_job = None if check.ended else check_job
        rollout = check.apply(rollout, template_hash, observed)
    strategy = {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}
    deadline_seconds = spec.engine.startup_timeout_seconds
    deployment = build_deployment(owner, strategy, template, image, template_hash, deadline_seconds)
    if verdict.cause is not None and former_template is not None:
        deployment = build_restored(deployment, former_template, proven, verdict.cause)
    children = [
        build_service_account(owner),
        build_config_map(owner, config),
        build_engine_service(owner, has_tls=has_tls),
        build_public_service(owner, settings.gateway_host, has_tls=has_tls),
        deployment,
        build_disruption_budget(owner),
    ]
    if spec.adapters:
        children.append(build_adapter_list(owner, spec))
    if issuer is not None:
        gateways = f"{settings.system_namespace}/{settings.gateway_account}"
        children.append(build_callers(owner, gateways, issuer))
    if check_job is not None:
        children.append(check_job)
    if settings.network_policies:
        network = Network(settings.system_namespace, settings.prometheus_namespaces)
        children.append(build_network_policy(owner, network))
    if access_mode is not None:
        children.append(build_claim(owner, spec, access_mode))
    if spec.model.cache.prewarm:
        children.append(build_prewarm(owner, template, image, one_node=access_mode == "ReadWriteOnce"))
    period_seconds = pod_starts.choose_period(spec.queue.timeout_seconds)
    autoscaler = build_autoscaler(owner, service.settled_spec, period_seconds)
    follows_starts = autoscaler is not None and spec.autoscaling and not spec.autoscaling.names_scale_up_policies
    effective = EffectiveStatus(
        image=spec.engine.image or image,
        mode=service.batching.mode,
        max_batch_size=service.batching.effective_batch_size,
        window=service.batching.effective_window,
        max_surge=rollout.max_surge,
        max_unavailable=rollout.max_unavailable,
        pod_starts=[f"{seconds}s" for seconds in pod_starts.seconds] or None,
        scale_up_period=f"{period_seconds}s" if follows_starts else None,
        cache_access_mode=access_mode,
        queue_classes=[_describe_class(spec.queue, each) for each in spec.queue.ordered_classes] or None,
        from_profile=list(from_profile) or None,
        resources=describe_resources(spec.resources),
        tensor_parallel_size=spec.tensor_parallel_size if spec.tensor_parallel_size > 1 else None,
    )
    if autoscaler is not None and spec.autoscaling and not spec.autoscaling.uses_keda:
        children.append(autoscaler)
    elif autoscaler is not None and serves_keda:
        children.append(build_scaled_object(autoscaler, settings.metrics_url))
    times = (
        rollout.look_again_at,
        verdict.look_again_at,
        find_next_end(observed.pods, period_seconds, now),
        find_gap_end(observed.autoscaler),
    )
    return Desired(
        owner,
        spec,
        effective,
        tuple(children),
        template_hash,
        rollout,
        check_job,
        attempt,
        verdict,
        min((at for at in times if at and at > now), default=None),
        count_starting(observed.pods, _count_ready(observed), period_seconds, now),
        find_lapse(observed.pods, period_seconds, now),
    )


def _removes_engine(rollout: Rollout, live: DeploymentState | None, template_hash: str, attempt: str) -> bool:
    """Return whether the rollout is about to remove an engine for a pod that has not run yet."""
    if not rollout.because or live is None or not live.available_replicas:
        return False
    if find_rolled_back(live, template_hash, attempt) is not None:
        return False
    return live.template_hash != template_hash or (live.replaces_pods and live.max_surge != 0)


def _count_ready(observed: Observed) -> int:
    return observed.deployment.ready_replicas if observed.deployment is not None else 0


def _choose_access_mode(spec: InferenceServiceSpec, owner: Owner, observed: Observed) -> str:
    """Return the access mode of the claim that Conveyor creates. All pods must be able to mount the claim.

    The mode of an existing claim can never change.
    """
    live = observed.children.get((CLAIM.kind, names.model_claim_name(owner.name)))
    if live is not None and live.access_mode:
        return live.access_mode
    return "ReadWriteOnce" if spec.most_replicas <= 1 and spec.rollout.max_surge in (None, 0, "0%") else "ReadWriteMany"


def _describe_class(queue: Queue, own: RequestClass) -> QueueClassStatus:
    best, worst = queue.ordered_classes[0], queue.ordered_classes[-1]
    levels = (worst if own.on_timeout == "Delay" else own).level - best.level
    return QueueClassStatus(
        name=own.name,
        level=own.level,
        max_requests=own.max_requests or queue.max_requests,
        timeout=queue.timeout if own.timeout is None or own.on_timeout == "Delay" else own.timeout,
        overtaken_for=f"{round(levels * LEVEL_AGEING_SECONDS + MAX_OFFSET_SECONDS)}s",
    )
