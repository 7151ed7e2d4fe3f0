"""Decides which LoRA adapters the device has, if requests use more adapters than there are slots. Pure.

`scheduler` admits only requests whose adapters are in a slot. `loop.adapters` asks which adapter is next, and loads and
unloads. The adapters of the first waiting requests have a claim to slots. A slot whose adapter has no claim and no
admitted request is taken, the one least recently used first. If there are too few such slots, adapters without a claim
are closed: they get no further requests until their last one has ended, and then lose their slots. So popular adapters
cannot keep the slots for ever, as they could in vLLM and SGLang (sglang#15129).

The bound: an adapter that stays closed until it is taken loses its slot after its longest admitted answer, and all
adapters that claim a slot get one in this time. So a request whose adapter is number n in the queue, counted by
adapters, waits for its adapter at most n / slots times (rounded up) for the longest answer and for the loading.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

_LOOKED_AT = 32  # waiting requests for each slot, from the first one on


class AdapterSlots:
    """The adapters in slots, least recently used first, by their numbers."""

    def __init__(self, num_slots: int, num_fixed: int) -> None:
        """num_fixed: adapters with the numbers from 1 on are always on the device, and take no slots."""
        self._num_slots = num_slots
        self.limit = num_slots
        """The number of slots until the next `put`. It is lower if memory has no room for another adapter."""
        self.misses = False
        """Whether a waiting request was passed over since this was last set to False."""
        self._num_fixed = num_fixed
        self._held: dict[int, None] = {}
        self._closed: list[int] = []  # in the order in which they were closed

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __contains__(self, adapter: int) -> bool:
        return adapter in self._held

    @property
    def has_free(self) -> bool:
        return len(self._held) < self.limit

    def takes(self, adapter: int) -> bool:
        """Return whether a request with this adapter may be admitted."""
        if adapter <= self._num_fixed or (adapter in self._held and adapter not in self._closed):
            return True
        self.misses = True
        return False

    def use(self, adapter: int) -> None:
        """Note that a request with this adapter is admitted."""
        if adapter in self._held:
            del self._held[adapter]
            self._held[adapter] = None

    def put(self, adapter: int) -> None:
        """Give a free slot to an adapter that is loaded now."""
        self._held[adapter] = None
        self.limit = self._num_slots

    def free(self, adapter: int) -> None:
        """Free an adapter's slot, if it has one."""
        self._held.pop(adapter, None)
        self._closed = [each for each in self._closed if each != adapter]

    def list_wanted(self, waiting: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the adapters that claim a slot, and those of them that have none, both in the queue's order.

        waiting: the adapters of the waiting requests, in the queue's order.
        """
        claims = list(islice(self._distinct(islice(waiting, _LOOKED_AT * self.limit)), self.limit))
        return claims, [adapter for adapter in claims if adapter not in self._held]

    def _distinct(self, adapters: Iterable[int]) -> Iterator[int]:
        seen = set[int]()
        for adapter in adapters:
            if adapter > self._num_fixed and adapter not in seen:
                seen.add(adapter)
                yield adapter

    def find_victim(self, claims: Collection[int], wanted: Collection[int], in_use: Collection[int]) -> int | None:
        """Return the adapter that loses its slot now, for the first wanted one. None: no slot can be taken now.

        Closes as many adapters as are needed for the others. in_use: the adapters of admitted requests.
        """
        idle = [each for each in self._held if each not in in_use and each not in claims]
        num_needed = max(0, len(wanted) - len(idle) - max(0, self.limit - len(self._held)))
        busy = [each for each in self._held if each in in_use and each not in claims and each not in self._closed]
        self._closed = [*self._closed, *busy][:num_needed]
        if not wanted or self.has_free:
            return None
        drained = (each for each in self._closed if each not in in_use)
        return next(iter(idle), None) or next(drained, None)
