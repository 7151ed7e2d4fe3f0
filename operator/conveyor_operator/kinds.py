"""The class `Kind`, which has the API coordinates of a kind of objects, and the kinds that the operator uses.

Used everywhere. The coordinates are constants, so no API discovery is needed. The kind of a reconciled resource is
defined in the package of this resource.
"""

from dataclasses import dataclass
from typing import NamedTuple

from conveyor_api import names


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects. `group` is empty for the core API."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of an object, or of the collection if there is no name."""
        prefix = f"apis/{self.group}" if self.group else "api"
        place = f"namespaces/{namespace}/" if self.namespaced and namespace else ""
        parts = [f"/{prefix}/{self.version}/{place}{self.plural}", name, subresource]
        return "/".join(part for part in parts if part)


class Key(NamedTuple):
    """Identifies an object. The loop's workers, store and memory use it as a key."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SERVICE = Kind("", "v1", "Service", "services")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
JOB = Kind("batch", "v1", "Job", "jobs")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")

SERVED_NAME = Kind(names.GROUP, names.VERSION, names.SERVED_NAME_KIND, names.SERVED_NAME_PLURAL)

REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets")
POD = Kind("", "v1", "Pod", "pods")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")

LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = Kind("", "v1", "Event", "events")
SECRET = Kind("", "v1", "Secret", "secrets")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
API_SERVICE = Kind("apiregistration.k8s.io", "v1", "APIService", "apiservices", namespaced=False)
