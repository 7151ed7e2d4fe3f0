"""Whether grammars may be followed, and the grammars for which that is not known yet. Used by `client`."""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

from conveyor_engine.masks import limits
from conveyor_engine.masks.messages import Compile

_VERDICTS_MAX: Final = 1024
_STARTS_MAX: Final = 4  # of a grammar's trial and compilation together


class Verdict(NamedTuple):
    """Whether a grammar may be followed. `problem` is empty if it may."""

    problem: str
    is_too_costly: bool = False


TOO_COSTLY: Final = Verdict(limits.TOO_COSTLY_TO_COMPILE, is_too_costly=True)


def key_of(grammar: str) -> bytes:
    """Return a short name of the grammar."""
    return blake2b(grammar.encode(), digest_size=16).digest()


class Order:
    """A grammar that is tried or compiled."""

    def __init__(self, number: int, key: bytes, grammar: str) -> None:
        self.number, self.key, self.grammar = number, key, grammar
        self.num_bytes = 0
        self.is_tried = False
        self.num_starts = 0

    def compilation(self) -> Compile:
        """Return the message for the walker, after the trial."""
        return Compile(self.number, self.grammar, self.num_bytes)


class Verdicts:
    """The most recent verdicts, and the orders that will have one."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # the most recently used last
        self._orders: dict[int, Order] = {}
        self._by_key: dict[bytes, Order] = {}
        self._last_fatal = ""  # the grammar of the last answer that ended a walker

    def find(self, key: bytes) -> Verdict | None:
        """Return the verdict, if there is one."""
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def add(self, key: bytes, grammar: str) -> Order | None:
        """Return a new order; None if the grammar has one already."""
        if key in self._by_key:
            return None
        order = Order(next(self._numbers), key, grammar)
        self._by_key[key] = self._orders[order.number] = order
        return order

    def find_order(self, number: int) -> Order | None:
        """Return the order with this number, if it has no verdict yet and is not cancelled."""
        return self._orders.get(number)

    def list_orders(self, *, are_tried: bool) -> list[Order]:
        """Return the orders that are compiled, or those that are tried."""
        return [order for order in self._orders.values() if order.is_tried == are_tried]

    def cancel(self, key: bytes) -> Order | None:
        """Remove and return the order of a grammar that is being tried."""
        order = self._by_key.get(key)
        if order is None or order.is_tried:
            return None
        del self._by_key[key], self._orders[order.number]
        return order

    def conclude(self, order: Order, verdict: Verdict) -> None:
        """End the order with this verdict."""
        self._orders.pop(order.number, None)
        self._by_key.pop(order.key, None)
        self._keep(order.key, verdict)

    def conclude_all(self, verdict: Verdict) -> None:
        """End all orders with this verdict."""
        for order in list(self._orders.values()):
            self.conclude(order, verdict)

    def restart(self) -> None:
        """Count one more start for each order. End those that have started too often."""
        for order in list(self._orders.values()):
            order.num_starts += 1
            if order.num_starts > _STARTS_MAX:
                self.conclude(order, TOO_COSTLY)

    def count_death(self, grammar: str) -> None:
        """Record that an answer of this grammar ended a walker. The second one in succession refuses the grammar."""
        if grammar == self._last_fatal:
            self._keep(key_of(grammar), TOO_COSTLY)
        self._last_fatal = grammar

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > _VERDICTS_MAX:
            self._verdicts.popitem(last=False)
