"""The class `ObjectKind`, which has the API coordinates of a kind of objects, and the kinds that the operator uses.

Used everywhere. The coordinates are constants, so no API discovery is needed. The kind of a reconciled resource is
defined in the package of this resource.
"""

from dataclasses import dataclass
from typing import NamedTuple

from conveyor_api import names


@dataclass(frozen=True, slots=True)
class ObjectKind:
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

    kind: ObjectKind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


SERVICE_ACCOUNT = ObjectKind("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM = ObjectKind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
CONFIG_MAP = ObjectKind("", "v1", "ConfigMap", "configmaps")
SERVICE = ObjectKind("", "v1", "Service", "services")
NETWORK_POLICY = ObjectKind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
JOB = ObjectKind("batch", "v1", "Job", "jobs")
DEPLOYMENT = ObjectKind("apps", "v1", "Deployment", "deployments")
DISRUPTION_BUDGET = ObjectKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
AUTOSCALER = ObjectKind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = ObjectKind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")

API_KEY = ObjectKind(names.GROUP, names.VERSION, names.API_KEY_KIND, names.API_KEY_PLURAL)
SERVED_NAME = ObjectKind(names.GROUP, names.VERSION, names.SERVED_NAME_KIND, names.SERVED_NAME_PLURAL)

REPLICA_SET = ObjectKind("apps", "v1", "ReplicaSet", "replicasets")
POD = ObjectKind("", "v1", "Pod", "pods")
ENDPOINT_SLICE = ObjectKind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")

LEASE = ObjectKind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = ObjectKind("", "v1", "Event", "events")
SECRET = ObjectKind("", "v1", "Secret", "secrets")
NAMESPACE = ObjectKind("", "v1", "Namespace", "namespaces", namespaced=False)
CLUSTER_ROLE = ObjectKind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
API_SERVICE = ObjectKind("apiregistration.k8s.io", "v1", "APIService", "apiservices", namespaced=False)
