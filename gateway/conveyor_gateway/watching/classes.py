"""The classes of a service's queue. Pure.

`catalog` reads them from the spec. `relaying.priority` chooses a request's class, and `admission` enforces the limits.
"""

from dataclasses import dataclass, field

from conveyor_api.queue import Queue


@dataclass(frozen=True, slots=True)
class QueueClass:
    """One class. None means that only the queue's own limit applies. Limits are for all gateways together."""

    name: str = ""
    level: int = 0  # lower goes first
    max_queued_requests: int | None = None
    timeout_seconds: float | None = None
    is_delayed: bool = False  # whether requests are delayed after the timeout, not rejected
    max_share_percent: int | None = None


UNCLASSED = QueueClass()


@dataclass(frozen=True, slots=True)
class QueueClasses:
    """The classes of one service, the most urgent first; empty without classes."""

    ordered: tuple[QueueClass, ...] = ()
    default: QueueClass = UNCLASSED
    best: QueueClass = UNCLASSED  # the most urgent class that a client may have
    is_shortest_first: bool = False
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(each.name for each in self.ordered))

    @property
    def worst_level(self) -> int:
        return self.ordered[-1].level if self.ordered else 0

    def find_name(self, name: str) -> QueueClass | None:
        return next((each for each in self.ordered if each.name == name), None)

    def find_priority(self, priority: int) -> QueueClass:
        """Return the class with the nearest level at or above `priority`, or the least urgent class."""
        return next((each for each in self.ordered if each.level >= priority), self.ordered[-1])

    def lower(self, chosen: QueueClass, max_class: str) -> QueueClass:
        """Return `chosen`, or a less urgent class: the one that clients may have, or the caller's own limit.

        max_class: the name of this limit; "" without one. A name of no class limits the caller to the least urgent one.
        """
        limits = [self.best]
        if max_class and self.ordered:
            limits.append(self.find_name(max_class) or self.ordered[-1])
        return max(chosen, *limits, key=lambda each: each.level)


WITHOUT_CLASSES = QueueClasses()


def parse_classes(queue: Queue) -> QueueClasses:
    """Parse the classes of `spec.queue`."""
    ordered = tuple(
        QueueClass(
            each.name,
            each.level,
            each.max_requests,
            each.timeout_seconds,
            each.on_timeout == "Delay",
            each.max_share,
        )
        for each in queue.ordered_classes
    )
    named, is_shortest_first = {each.name: each for each in ordered}, queue.order == "ShortestFirst"
    if not ordered:
        return QueueClasses(is_shortest_first=is_shortest_first)
    default = named.get(queue.default_class or "", ordered[-1])
    best = named.get(queue.max_class or "", ordered[0])
    return QueueClasses(ordered, default, best, is_shortest_first)
