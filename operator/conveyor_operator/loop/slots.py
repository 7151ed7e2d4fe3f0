"""Slots for reconciles. Namespaces get them in turn, and no namespace gets more than its share.

`workers` takes one slot for each reconcile. A namespace with many resources, or with slow writes, delays only itself.
Reconciles that are not urgent, such as those of a full resync, get a slot when no urgent one can take it.
"""

import asyncio
from collections import Counter


class Turn:
    """One reconcile that waits for a slot."""

    __slots__ = ("granted", "namespace", "urgent")

    def __init__(self, namespace: str, urgent: bool) -> None:
        self.namespace = namespace
        self.urgent = urgent
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Line:
    """The reconciles that wait, either the urgent ones or the others."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[Turn, None]] = {}
        self.namespaces: dict[str, None] = {}
        """Namespaces with waiting reconciles and with fewer slots than their share, in the order of their turns."""

    def add(self, turn: Turn) -> None:
        self.waiting.setdefault(turn.namespace, {})[turn] = None

    def remove(self, turn: Turn) -> None:
        turns = self.waiting.get(turn.namespace, {})
        turns.pop(turn, None)
        if not turns:
            self.waiting.pop(turn.namespace, None)
            self.namespaces.pop(turn.namespace, None)


class Slots:
    """Grants `limit` slots, of which a namespace has at most `share`.

    `ask` queues for a slot, `take` waits for it, and `release` frees it. Within a namespace, urgent reconciles get
    slots first, and otherwise the order of `ask` counts. No slots are granted before `open`.
    """

    def __init__(self, limit: int, share: int) -> None:
        self._limit = limit
        self._free = 0
        self._share = share
        self._held: Counter[str] = Counter()
        self._urgent, self._others = _Line(), _Line()

    def open(self) -> None:
        """Begin to grant slots."""
        self._free += self._limit
        self._hand_out()

    def request(self, namespace: str, urgent: bool) -> Turn:
        """Queue for a slot. Returns the turn with which to call `take`."""
        turn = Turn(namespace, urgent)
        self._enqueue(turn)
        return turn

    async def take(self, turn: Turn) -> None:
        """Wait until the turn has a slot."""
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.cancelled():
                self._line_of(turn).remove(turn)
            else:  # the slot was granted before the cancellation
                self.release(turn.namespace)
            raise

    def make_urgent(self, turn: Turn) -> None:
        """Move a waiting turn to the urgent ones."""
        if not turn.urgent and not turn.granted.done():
            self._others.remove(turn)
            turn.urgent = True
            self._enqueue(turn)

    def release(self, namespace: str) -> None:
        self._free += 1
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]
        self._line_up(namespace)
        self._hand_out()

    def _enqueue(self, turn: Turn) -> None:
        self._line_of(turn).add(turn)
        self._line_up(turn.namespace)
        self._hand_out()

    def _line_of(self, turn: Turn) -> _Line:
        return self._urgent if turn.urgent else self._others

    def _line_up(self, namespace: str) -> None:
        if self._held[namespace] < self._share:
            for line in (self._urgent, self._others):
                if namespace in line.waiting:
                    line.namespaces.setdefault(namespace)

    def _hand_out(self) -> None:
        for line in (self._urgent, self._others):
            while self._free and line.namespaces:
                namespace = next(iter(line.namespaces))
                del line.namespaces[namespace]
                if self._held[namespace] >= self._share:
                    continue  # the namespace's share is in use; `release` lines the namespace up again
                turn = next(iter(line.waiting[namespace]))
                line.remove(turn)
                if not turn.granted.cancelled():
                    self._free -= 1
                    self._held[namespace] += 1
                    turn.granted.set_result(None)
                self._line_up(namespace)  # behind all others
