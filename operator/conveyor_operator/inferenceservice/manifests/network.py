"""The NetworkPolicy of an InferenceService's engines. Pure."""

from dataclasses import dataclass

from conveyor_api import names
from conveyor_operator.loop.owner import Object, Owner, build_metadata

_NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"  # Kubernetes sets it, and it cannot be changed


@dataclass(frozen=True, slots=True)
class Network:
    """The peers that may connect to engines: the gateways in `system_namespace`, and pods in Prometheus' namespaces."""

    system_namespace: str
    prometheus_namespaces: tuple[str, ...] = ()


def build_network_policy(owner: Owner, network: Network) -> Object:
    """Return a policy that only admits gateways and Prometheus' namespaces. By default engines authenticate nobody.

    Egress is not restricted.
    """
    gateways = {**_select(network.system_namespace), "podSelector": {"matchLabels": names.GATEWAY_POD_LABELS}}
    peers = [gateways, *(_select(namespace) for namespace in network.prometheus_namespaces)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": build_metadata(owner, names.engine_name(owner.name)),
        "spec": {
            "podSelector": {"matchLabels": names.pod_selector(owner.name)},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": names.ENGINE_PORT}], "from": peers}],
        },
    }


def _select(namespace: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: namespace}}}
