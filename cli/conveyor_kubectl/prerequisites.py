"""Checks that a cluster has what Conveyor needs, before the installation. Used by `command`.

Each check is a function that returns a verdict and a sentence. Nothing is written to the cluster.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from conveyor_api import names
from conveyor_api.crd import build_crd
from conveyor_api.quantities import parse_quantity
from conveyor_insight.facts import Object
from conveyor_kubectl.cluster import Cluster, Refused
from conveyor_kubectl.rolling_back import CRD
from conveyor_operator.kinds import API_SERVICE, CLUSTER_ROLE, DEPLOYMENT, SCALED_OBJECT, ObjectKind

OLDEST_KUBERNETES: Final = (1, 34)
_BINDING: Final = ObjectKind(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
_NODE: Final = ObjectKind("", "v1", "Node", "nodes", namespaced=False)
_STORAGE_CLASS: Final = ObjectKind("storage.k8s.io", "v1", "StorageClass", "storageclasses", namespaced=False)
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"


class Verdict(StrEnum):
    """The result of a check.

    MISSING: an installation would fail or not work. LOOK: the finding may be a problem, or intended.
    """

    GOOD = "ok"
    LOOK = "look"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    sentence: str


Answer = tuple[Verdict, str]


def check(cluster: Cluster) -> Iterator[Finding]:
    """Run the checks in the order in which an installation needs the results.

    Facts that the user may not read are reported as LOOK. Raises Unanswered if the API server does not respond.
    """
    questions: dict[str, Callable[[Cluster], Answer]] = {
        "Kubernetes": _check_version,
        "rights": _check_rights,
        "GPUs": _check_gpus,
        names.METRICS_GROUP: _check_metrics_api,
        "KEDA": _check_keda,
        "StorageClass": _check_storage,
        "CRD": _check_crd,
    }
    for subject, question in questions.items():
        try:
            yield Finding(subject, *question(cluster))
        except Refused as error:
            yield Finding(subject, Verdict.LOOK, f"cannot be read: {error}")


def _check_version(cluster: Cluster) -> Answer:
    version = str(cluster.get("/version")["gitVersion"])
    found = re.match(r"v(\d+)\.(\d+)", version)
    if found is None:
        return Verdict.LOOK, f"the version {version} cannot be parsed"
    oldest = ".".join(map(str, OLDEST_KUBERNETES))
    if (int(found[1]), int(found[2])) < OLDEST_KUBERNETES:
        return Verdict.MISSING, f"{version} is too old; {oldest} or newer is needed"
    return Verdict.GOOD, f"{version}; {oldest} or newer is needed"


def _check_rights(cluster: Cluster) -> Answer:
    """Check the right to create CRDs, ClusterRoles, ClusterRoleBindings and Deployments, as the chart does."""
    needed = (CRD, CLUSTER_ROLE, _BINDING, DEPLOYMENT)
    refused = [kind.plural for kind in needed if not cluster.may("create", kind, names.SYSTEM_NAMESPACE)]
    if refused:
        return Verdict.MISSING, f"you may not create {', '.join(refused)}; install with an account that may"
    return Verdict.GOOD, f"you may create {', '.join(kind.plural for kind in needed)}"


def _check_gpus(cluster: Cluster) -> Answer:
    nodes = cluster.get(_NODE.path(None))["items"]
    allocatable = [node.get("status", {}).get("allocatable") or {} for node in nodes]
    found = {name for amounts in allocatable for name in amounts if name.startswith(names.GPU_VENDOR)}
    counts = {name: sum(_count(amounts, name) for amounts in allocatable) for name in sorted(found)}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if not text:
        return (
            Verdict.LOOK,
            f"none of {len(nodes)} nodes offers {names.GPU_VENDOR}*; GPUs need their vendor's device plugin",
        )
    holders = sum(any(_count(amounts, name) for name in counts) for amounts in allocatable)
    return Verdict.GOOD, f"{text} on {holders} of {len(nodes)} nodes"


def _count(amounts: Object, name: str) -> int:
    return int(parse_quantity(amounts.get(name, 0)))


def _check_metrics_api(cluster: Cluster) -> Answer:
    registered = [
        cluster.find(API_SERVICE.path(None, f"{each}.{names.METRICS_GROUP}")) for each in names.METRICS_VERSIONS
    ]
    owners = {_owner(body) for body in registered if body is not None}
    others = sorted(owner for owner in owners if not owner.endswith(f"/{names.METRICS_SERVICE}"))
    if others:
        return (
            Verdict.LOOK,
            f"{others[0]} serves it, and Conveyor does not replace it; set autoscaling.provider: KEDA or External",
        )
    return Verdict.GOOD, "Conveyor serves it" if owners else "not registered yet; Conveyor registers it"


def _owner(body: Object) -> str:
    service = body["spec"].get("service") or {}
    return f"{service.get('namespace', '')}/{service.get('name', 'the API server')}"


def _check_keda(cluster: Cluster) -> Answer:
    if cluster.find(f"/apis/{SCALED_OBJECT.api_version}") is None:
        return Verdict.GOOD, "not installed; only services with autoscaling.provider: KEDA need it"
    return Verdict.GOOD, "installed; services with autoscaling.provider: KEDA can use it"


def _check_storage(cluster: Cluster) -> Answer:
    classes = cluster.get(_STORAGE_CLASS.path(None))["items"]
    default = [one["metadata"]["name"] for one in classes if _is_default(one)]
    if default:
        return Verdict.GOOD, f"{default[0]} is the default"
    return Verdict.LOOK, "no default; services with model.cache.strategy: PVC must set model.cache.storageClassName"


def _is_default(storage_class: Object) -> bool:
    return bool((storage_class["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true")


def _check_crd(cluster: Cluster) -> Answer:
    body = cluster.find(CRD.path(None, names.CRD_NAME))
    if body is None:
        return Verdict.GOOD, "not installed yet; the chart installs it"
    if [version["schema"] for version in body["spec"]["versions"]] == [
        version["schema"] for version in build_crd()["spec"]["versions"]
    ]:
        return Verdict.GOOD, "the same as in this release"
    return Verdict.LOOK, "from another release; the chart replaces it, and fields that the new CRD lacks are lost"
