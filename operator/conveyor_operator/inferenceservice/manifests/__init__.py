"""The children of an InferenceService, built from its spec. Pure: spec in, dictionaries out.

`build_children` is called by `reconcile`; one module per group of kinds. Nothing here looks at the cluster: what
depends on it (the image that was resolved, the claim's access mode, replicas) is an argument or is added later.
"""

from dataclasses import dataclass

from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler, build_disruption_budget
from conveyor_operator.inferenceservice.manifests.config import build_config_map, build_engine_config
from conveyor_operator.inferenceservice.manifests.deployment import build_deployment
from conveyor_operator.inferenceservice.manifests.metadata import Object, Owner
from conveyor_operator.inferenceservice.manifests.model import build_claim, needs_claim
from conveyor_operator.inferenceservice.manifests.network import Network, build_network_policy
from conveyor_operator.inferenceservice.manifests.services import (
    build_engine_service,
    build_public_service,
    build_service_account,
)

__all__ = ["Choices", "Network", "Object", "Owner", "build_children"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the spec leaves to the installation, or to what is already there."""

    engine_image: str
    gateway_host: str
    claim_access_mode: str
    network: Network | None = None
    """None: whoever runs the cluster says who may reach the engines."""


def build_children(owner: Owner, spec: InferenceServiceSpec, choices: Choices) -> list[Object]:
    """All children that this spec asks for. The Deployment comes without replicas: `replicas` decides on them."""
    config = build_engine_config(owner, spec)
    children = [
        build_service_account(owner),
        build_config_map(owner, config),
        build_engine_service(owner),
        build_public_service(owner, choices.gateway_host),
        build_deployment(owner, spec, choices.engine_image, config),
        build_disruption_budget(owner),
    ]
    if choices.network is not None:
        children.append(build_network_policy(owner, choices.network))
    if needs_claim(spec):
        children.append(build_claim(owner, spec, choices.claim_access_mode))
    autoscaler = build_autoscaler(owner, spec)
    return children if autoscaler is None else [*children, autoscaler]
