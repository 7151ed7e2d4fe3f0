"""Limits how fast replicas may change, by the policies of an HPA's `behavior`. Pure; used by `hpa`.

For policies in percent, the new number of replicas is rounded up when scaling up, so that one replica can become two.
When scaling down, it is rounded down.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from conveyor_api.autoscaling import ScalingPolicy, ScalingRules


class Change(NamedTuple):
    """A number of replicas, and the time at which they were desired, added or removed."""

    at: float
    number: int


def limit_up(rules: ScalingRules, now: float, replicas: int, ups: Iterable[Change], downs: Iterable[Change]) -> int:
    """Return the most replicas that the policies allow now; below `replicas` if earlier changes exceeded them."""
    return (min if rules.select_policy == "Min" else max)(_allowed(_raise, rules, now, replicas, ups, downs))


def limit_down(rules: ScalingRules, now: float, replicas: int, ups: Iterable[Change], downs: Iterable[Change]) -> int:
    """Return the fewest replicas that the policies allow now."""
    return (max if rules.select_policy == "Min" else min)(_allowed(_lower, rules, now, replicas, ups, downs))


def _allowed(
    change: Callable[[ScalingPolicy, int], int],
    rules: ScalingRules,
    now: float,
    replicas: int,
    ups: Iterable[Change],
    downs: Iterable[Change],
) -> list[int]:
    """Return the limit of each policy."""
    if rules.select_policy == "Disabled":
        return [replicas]
    return [change(policy, _at_period_start(policy, now, replicas, ups, downs)) for policy in rules.policies or ()]


def _raise(policy: ScalingPolicy, start: int) -> int:
    return start + policy.value if policy.type == "Pods" else math.ceil(start * (1 + policy.value / 100))


def _lower(policy: ScalingPolicy, start: int) -> int:
    return start - policy.value if policy.type == "Pods" else int(start * (1 - policy.value / 100))


def _at_period_start(
    policy: ScalingPolicy, now: float, replicas: int, ups: Iterable[Change], downs: Iterable[Change]
) -> int:
    added, removed = (
        sum(change.number for change in changes if change.at > now - policy.period_seconds) for changes in (ups, downs)
    )
    return replicas - added + removed
