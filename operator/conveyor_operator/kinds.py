"""Kinds of objects: their API coordinates, and those of Kubernetes' own that the operator reads and writes.

Used everywhere. Fixed, so no API discovery is needed. The kinds of a resource that is reconciled
stand in its own room.
"""

from dataclasses import dataclass
from typing import NamedTuple

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


class Key(NamedTuple):
    """One object of a kind: what the loop's workers, store and memory are addressed by."""

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
