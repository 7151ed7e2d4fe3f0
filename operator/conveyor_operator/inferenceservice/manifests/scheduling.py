"""Completes the scheduling fields of pods, which mostly come from the spec unchanged. Pure.

In Kubernetes, a constraint or a term without a label selector matches no pod, so it has no effect or can never be met.
Here it means the service's own engines. A profile can thus spread the pods of every service that uses it: it cannot
contain a selector with the service's name.
"""

from collections.abc import Callable, Iterable

from conveyor_api import names
from conveyor_operator.loop.owner import Object

_POD_TERMS = ("podAffinity", "podAntiAffinity")
_REQUIRED, _PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))


def select_engines(scheduling: Object, service: str) -> Object:
    """Return a pod's fields. Spread constraints and pod terms without a label selector get one for the engines."""
    selector = {"labelSelector": {"matchLabels": names.pod_selector(service)}}
    changed: Object = {}
    if spread := scheduling.get("topologySpreadConstraints"):
        changed["topologySpreadConstraints"] = [selector | constraint for constraint in spread]
    if affinity := scheduling.get("affinity"):
        changed["affinity"] = _change_terms(affinity, lambda terms: [selector | term for term in terms])
    return scheduling | changed


def without_terms_about_engines(affinity: Object, service: str) -> Object:
    """Return an affinity for a pod of the service that is no engine, without the terms that select the engines."""
    own = {"matchLabels": names.pod_selector(service)}
    return _change_terms(affinity, lambda terms: [term for term in terms if term.get("labelSelector") != own])


def _change_terms(affinity: Object, change: Callable[[Iterable[Object]], list[Object]]) -> Object:
    """Apply `change` to the required terms, and to each preferred one, whose weight stays."""
    changed = dict(affinity)
    for kind in _POD_TERMS:
        if kind not in affinity:
            continue
        rules = dict(affinity[kind])
        if _REQUIRED in rules:
            rules[_REQUIRED] = change(rules[_REQUIRED])
        if _PREFERRED in rules:
            rules[_PREFERRED] = [
                {**preference, "podAffinityTerm": term}
                for preference in rules[_PREFERRED]
                for term in change([preference["podAffinityTerm"]])
            ]
        changed[kind] = rules
    return changed
