"""Which engine image a service runs. Pure; used by `reconcile`.

An upgrade of Conveyor brings a new default image, and must not restart a single GPU pod. So a service keeps the image
it has (`status.engineImage`) until its pods are replaced anyway: because the spec changed what they look like, or
because the new operator renders them differently. Scaling, or editing the autoscaler, is not such a change.
"""

from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.manifests.config import build_engine_config
from conveyor_operator.manifests.deployment import build_pod_template
from conveyor_operator.manifests.metadata import Owner
from conveyor_operator.observed import DeploymentState, hash_of


def choose_engine_image(
    owner: Owner, spec: InferenceServiceSpec, default: str, kept: str | None, live: DeploymentState | None
) -> str:
    """`kept` is what the status says; `live` the Deployment, whose annotation is the hash of the template we sent."""
    if spec.engine.image is not None:
        return spec.engine.image
    if kept and live is not None:
        template = build_pod_template(owner, spec, kept, build_engine_config(owner, spec))
        if hash_of(template) == live.template_hash:
            return kept
    return default
