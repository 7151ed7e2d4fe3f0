"""Lists the fields of a service that only a cluster can follow. Pure; used by `running`."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

# Fields of the spec without an effect here. A field that is not set is not listed.
NO_EFFECT: Final = (
    "access.serviceAccounts",
    "model.cache",
    "engine.image",
    "autoscaling.provider",
    "rollout",
    "profile",
    "metadata",
    "resources.requests",
    "resources.limits",
    "pod.labels",
    "pod.annotations",
    "pod.serviceAccountName",
    "pod.nodeSelector",
    "pod.tolerations",
    "pod.affinity",
    "pod.topologySpreadConstraints",
    "pod.priorityClassName",
    "pod.runtimeClassName",
    "pod.schedulerName",
    "pod.hostUsers",
    "pod.dnsConfig",
    "pod.hostAliases",
    "pod.securityContext",
    "pod.imagePullSecrets",
    "pod.resourceClaims",
)
_FOLLOWED: Final = ("nvidia.com/",)  # of the amounts in `resources.limits`: the number of GPUs


def list_without_effect(body: Mapping[str, Any]) -> list[str]:
    """Return the paths, below `spec`, of fields that are set and have no effect here."""
    return list(_list(body["spec"]))


def _list(spec: Mapping[str, Any]) -> Iterator[str]:
    for path in NO_EFFECT:
        value: Any = spec
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if path.startswith("resources.") and isinstance(value, Mapping):
            yield from (f"{path}.{name}" for name in value if not name.startswith(_FOLLOWED))
        elif value not in (None, {}, [], "Native"):
            yield path
