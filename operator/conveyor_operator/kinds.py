"""The kinds of objects the operator reads and writes: their API coordinates, once.

Used by `handlers` (what to watch), `manifests` (what to build), `plan` (in which order) and `cluster` (where to
send it). Fixed, so no API discovery is needed.
"""

from dataclasses import dataclass

from conveyor_api import names


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind; `group` is empty for the core API."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path; without a name the collection's."""
        prefix = f"apis/{self.group}" if self.group else "api"
        place = f"namespaces/{namespace}/" if self.namespaced and namespace else ""
        parts = [f"/{prefix}/{self.version}/{place}{self.plural}", name, subresource]
        return "/".join(part for part in parts if part)


INFERENCE_SERVICE = Kind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)

SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SERVICE = Kind("", "v1", "Service", "services")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")

# In the order in which they are applied: what pods need comes before the pods, what counts them after.
CHILDREN = (SERVICE_ACCOUNT, CLAIM, CONFIG_MAP, SERVICE, NETWORK_POLICY, DEPLOYMENT, DISRUPTION_BUDGET, AUTOSCALER)

POD = Kind("", "v1", "Pod", "pods")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")

# Made by controllers for our children; read for the status.
GRANDCHILDREN = (POD, ENDPOINT_SLICE)

WATCHED = (INFERENCE_SERVICE, *CHILDREN, *GRANDCHILDREN)

EVENT = Kind("", "v1", "Event", "events")
SECRET = Kind("", "v1", "Secret", "secrets")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
API_SERVICE = Kind("apiregistration.k8s.io", "v1", "APIService", "apiservices", namespaced=False)

BY_NAME = {kind.kind: kind for kind in WATCHED}
