"""Formats findings as text, and explanations as text or JSON. Pure; used by `command`."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

from conveyor_insight.explaining import Explanation, Metric
from conveyor_insight.facts import ClassFacts, LimitFacts
from conveyor_insight.tables import build_table
from conveyor_kubectl.prerequisites import Finding
from conveyor_protocol.limit_reasons import MEANINGS, LimitReason

_CLASS_HEAD: Final = ("CLASS", "LEVEL", "QUEUED", "LONGEST WAIT")
_HEAD: Final = ("METRIC", "VALUE", "TARGET", "RATIO", "TOLERANCE", "REPLICAS")


def build_text(found: Explanation) -> str:
    """Return an explanation as text: the replicas, tables of metrics and classes, and sentences."""
    starting = f", {found.starting} starting" if found.starting else ""
    count = f"{found.asked} replicas desired, {found.existing} current, {found.ready} ready{starting}"
    bounds = "" if found.bounds is None else f"; between {found.bounds[0]} and {found.bounds[1]}"
    parts = [f"InferenceService {found.namespace}/{found.name}: {count}{bounds}"]
    if found.metrics:
        parts.append(build_table([_HEAD, *map(_build_row, found.metrics)]))
    if found.classes:
        parts.append(build_table([_CLASS_HEAD, *map(_build_class_row, found.classes)]))
    if found.limits is not None:
        parts.append(_build_limits(found.limits, found.batch_size))
    problems = [f"{metric.name}: {metric.problem}" for metric in found.metrics if metric.problem]
    unread = (value for each in found.classes for value in (each.queued, each.wait_seconds) if isinstance(value, str))
    problems += [f"classes: {problem}" for problem in dict.fromkeys(unread)]
    parts.append("\n".join([f"{found.desired} replicas ({found.reason}). {found.sentences[0]}", *found.sentences[1:]]))
    return "\n\n".join([*parts, *(["\n".join(problems)] if problems else [])])


def _build_limits(limits: LimitFacts, batch_size: int) -> str:
    """Return how many requests an engine may run at once, with a line for each reason of this limit."""
    if isinstance(limits.running, str):
        return f"objectives: {limits.running}"
    if not limits.engines:
        return f"objectives: no engine with requests reports its limit; an engine runs up to {batch_size} requests"
    rows = [
        (f"{count} engine{'s' * (count != 1)}", reason, MEANINGS[LimitReason(reason)])
        for reason, count in limits.engines.items()
    ]
    return f"objectives: an engine runs {limits.running} of {batch_size} requests together\n{build_table(rows)}"


def _build_class_row(each: ClassFacts) -> tuple[str, ...]:
    wait = "unknown" if isinstance(each.wait_seconds, str) else f"{each.wait_seconds} s" if each.queued else ""
    return each.name, str(each.level), "unknown" if isinstance(each.queued, str) else str(each.queued), wait


def _build_row(metric: Metric) -> tuple[str, ...]:
    if metric.ratio is None or metric.tolerance is None:
        return metric.name, "unknown", _number(metric.target), "", "", ""
    ratio, tolerance = f"{metric.ratio:.2f}", f"{_number(metric.tolerance * 100)} %"
    return metric.name, str(metric.value), _number(metric.target), ratio, tolerance, str(metric.replicas)


def build_findings(findings: Sequence[Finding]) -> str:
    """Return the findings with one line for each."""
    return build_table([(each.verdict, each.subject, each.sentence) for each in findings])


def _number(value: Decimal) -> str:
    return format(value.normalize(), "f")


def build_json(found: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON. Ratios and targets are numbers.

    Values that were not read are null with a `problem`.
    """
    bounds = found.bounds and {"minReplicas": found.bounds[0], "maxReplicas": found.bounds[1]}
    return {
        "at": found.at.isoformat(),
        "namespace": found.namespace,
        "name": found.name,
        "replicas": {
            "asked": found.asked,
            "existing": found.existing,
            "ready": found.ready,
            "starting": found.starting,
        },
        "requests": found.counts and {"all": found.counts.requests, "waiting": found.counts.waiting},
        "bounds": bounds,
        "idleTimeoutSeconds": found.idle_timeout_seconds,
        "metrics": [_build_metric(metric) for metric in found.metrics],
        "classes": [_build_class(each) for each in found.classes],
        "objectives": found.limits and _build_limits_json(found.limits, found.batch_size),
        "desiredReplicas": found.desired,
        "reason": found.reason,
        "sentences": list(found.sentences),
        "autoscaler": found.autoscaler,
    }


def _build_class(each: ClassFacts) -> dict[str, Any]:
    values = {"waiting": each.queued, "waitSeconds": each.wait_seconds}
    numbers = {key: None if isinstance(value, str) else value for key, value in values.items()}
    problem = next((value for value in values.values() if isinstance(value, str)), None)
    return {"name": each.name, "level": each.level, **numbers, "problem": problem}


def _build_limits_json(limits: LimitFacts, batch_size: int) -> dict[str, Any]:
    is_read = not isinstance(limits.running, str)
    return {
        "running": limits.running if is_read else None,
        "maxBatchSize": batch_size,
        "engines": dict(limits.engines),
        "problem": None if is_read else limits.running,
    }


def _build_metric(metric: Metric) -> dict[str, Any]:
    ratio, tolerance = (None if value is None else float(value) for value in (metric.ratio, metric.tolerance))
    return {
        "name": metric.name,
        "value": metric.value,
        "target": float(metric.target),
        "ratio": ratio,
        "tolerance": tolerance,
        "desiredReplicas": metric.replicas,
        "problem": metric.problem or None,
    }
