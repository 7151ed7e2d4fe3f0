"""The waiting requests of one level, and what each client has been served. Used by `waiting` only. Pure.

The client that has been served least goes first, and a client's requests go in the order of `sort_key`. These are the
virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (2024), with predicted lengths: a
request is charged when it gets a place, and corrected when it ends. A client that returns is lifted to the counter of
the client that got the last place, so nobody saves up turns. A client that is lifted anyway needs no counter, so an
idle client keeps one only while it is above that of the last place, and at most MAX_IDLE do. What a client uses while
no other is active does not count, and a client that returns is at most MAX_DEBT_TOKENS above that of the last place.
"""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from conveyor_gateway.admission.ordered_index import Key, OrderedIndex
from conveyor_gateway.admission.ticket import Ticket, Work
from conveyor_gateway.capacity.amounts import Amounts
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS

# A request at its home overtakes only requests that arrived at most this much earlier, and those of other clients only
# if its client has been served at most this much more.
HOME_SECONDS: Final = 0.5
HOME_TOKENS: Final = 2048
MAX_DEBT_TOKENS: Final = 65_536  # weighed as the counters are; about eight answers of 4,096 tokens
MAX_IDLE: Final = 1024  # idle clients of one level with a counter
_DROPS_AT_ONCE: Final = 2  # accounts; each event adds one at most
_ANSWER_WEIGHT: Final = 2  # a token of an answer takes a step of its row, and those of a prompt share steps
_FIRST_MEAN_TOKENS: Final = 256.0
_OF_CLIENT: Final = 0.2  # how much an answer changes the mean length of its client's answers, and that of the level
_OF_LEVEL: Final = 0.05


def sort_key(ticket: Ticket) -> Key:
    """Return the key that orders a client's requests and the levels: the lowest key is first. Keys are different.

    Each level counts as LEVEL_AGEING_SECONDS of waiting. A key does not change with time, so two tickets keep their
    order while they wait. A level is overtaken only by tickets that arrive within (the level - the most urgent level) x
    LEVEL_AGEING_SECONDS after its first ticket, plus the difference of their offsets.
    """
    return ticket.admitted_at + ticket.offset_seconds + LEVEL_AGEING_SECONDS * ticket.level, ticket.number


def weigh(prompt_tokens: float, answer_tokens: float) -> float:
    """Return what a client is charged for these tokens, at least 1."""
    return max(1.0, prompt_tokens + _ANSWER_WEIGHT * answer_tokens)


@dataclass(slots=True, eq=False)
class _Account:
    """One client's waiting requests of a level, and its counter."""

    client: str
    number: int
    mean_tokens: float  # of its answers
    served: float = 0.0
    tickets: OrderedIndex[Ticket] = field(default_factory=OrderedIndex)
    num_running: int = 0
    placed: tuple[Key, Key, int, int] | None = None  # its keys in both orders, and its masks; None: nothing waits
    idle: int = 0  # the number of its valid entry among the idle accounts; 0: none


class Level:
    """The requests of one level. Each operation costs O(log n) for n waiting requests and accounts."""

    def __init__(self) -> None:
        self.size = 0
        self._accounts: dict[str, _Account] = {}
        self._by_served = OrderedIndex[_Account]()  # those with waiting requests, as `_by_age`
        self._by_age = OrderedIndex[_Account]()
        self._lengths = Amounts[str]()  # number of waiting requests by client
        self._idle: list[tuple[float, int, _Account]] = []  # a heap, with stale entries
        self._last_served = 0.0  # the counter of the client that got the last place, before it was charged
        self._mean_tokens = _FIRST_MEAN_TOKENS
        self._num_running = 0
        self._numbers = 0

    @property
    def is_unused(self) -> bool:
        """Whether no request waits or runs."""
        return not self.size and not self._num_running

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets in the order of `sort_key`."""
        return heapq.merge(*(each.tickets for each in self._by_age), key=sort_key)

    def add(self, ticket: Ticket) -> None:
        account = self._open(ticket.client)
        account.tickets.add(sort_key(ticket), ticket, ticket.excluded, ticket.home & ~ticket.excluded)
        self.size += 1
        self._lengths.add(ticket.client, 1)
        self._place(account)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting ticket. Raises KeyError if it does not wait."""
        account = self._accounts[ticket.client]
        self._remove(account, ticket)
        self._place(account)
        self._rest(account)

    def begin(self, ticket: Ticket, waits: bool) -> None:
        """Charge a ticket that gets a place, with the expected length of its answer. waits: whether it was added."""
        account = self._open(ticket.client)
        if waits:
            self._remove(account, ticket)
        account.num_running += 1
        self._num_running += 1
        self._last_served = max(self._last_served, account.served)
        ticket.charged = weigh(ticket.work.prompt_tokens, min(ticket.work.answer_tokens, account.mean_tokens))
        account.served += ticket.charged
        self._place(account)

    def end(self, ticket: Ticket, used: Work | None) -> None:
        """Record that a ticket has left its place. used: what it used; None: not known, so its charge stays."""
        account = self._leave(ticket)
        if used is not None:
            account.served += weigh(used.prompt_tokens, used.answer_tokens) - ticket.charged
            account.mean_tokens += _OF_CLIENT * (used.answer_tokens - account.mean_tokens)
            self._mean_tokens += _OF_LEVEL * (used.answer_tokens - self._mean_tokens)
            self._place(account)
        if self.size == account.tickets.size and self._num_running == account.num_running:  # no other is active
            self._last_served = max(self._last_served, account.served)
        self._rest(account)

    def undo(self, ticket: Ticket) -> None:
        """Take back the charge of a ticket that its engine has rejected. It must be added again."""
        account = self._leave(ticket)
        account.served -= ticket.charged
        self._place(account)

    def oldest(self, wanted: int) -> Ticket | None:
        """Return the first ticket of the client that waits longest, of those that the engines `wanted` can serve."""
        account = self._by_age.first(wanted)
        return None if account is None else account.tickets.first(wanted)

    def first_of_all(self) -> Ticket | None:
        """Return the first ticket in the order of `sort_key`; None without tickets."""
        return next(iter(next(iter(self._by_age)).tickets)) if self.size else None

    def first(self, wanted: int, skipped: Collection[str]) -> Ticket | None:
        """Return the ticket that comes next if the engines of the mask `wanted` have places.

        It is of the client that has been served least, of those that are not skipped. If none of these engines is its
        home, a ticket at its home may overtake it (HOME_SECONDS, HOME_TOKENS).
        """
        account = self._by_served.first(wanted)
        while account is not None and account.client in skipped:
            account = self._by_served.first(wanted, (account.served, account.number))
        if account is None or (first := account.tickets.first(wanted)) is None:
            return None
        if not first.home & ~first.excluded & wanted and (near := self._by_served.first_at_home(wanted)) is not None:
            at_home = near.tickets.first_at_home(wanted)
            is_soon = at_home is not None and sort_key(at_home)[0] <= sort_key(first)[0] + HOME_SECONDS
            if is_soon and near.served <= account.served + HOME_TOKENS and near.client not in skipped:
                return at_home
        return first

    def list_clients(self, most: int) -> Iterator[tuple[str, int, Ticket]]:
        """Yield the clients that wait longest, and the one with most requests: its name, their number and the first."""
        first = [each.client for each in islice(self._by_age, most)]
        for client in dict.fromkeys([*first, *filter(None, (self._lengths.find_first(),))]):
            tickets = self._accounts[client].tickets
            yield client, tickets.size, next(iter(tickets))

    def last(self) -> Ticket | None:
        """Return the last ticket of the client with most of them; None without tickets."""
        client = self._lengths.find_first()
        return None if client is None else self._accounts[client].tickets.last()

    def _open(self, client: str) -> _Account:
        """Return the client's account. If nothing of it waits, its counter is lifted and its debt bounded."""
        account = self._accounts.get(client)
        if account is None:
            self._numbers += 1
            account = self._accounts[client] = _Account(client, self._numbers, self._mean_tokens)
        if not account.tickets.size:
            account.served = min(max(account.served, self._last_served), self._last_served + MAX_DEBT_TOKENS)
        account.idle = 0
        return account

    def _leave(self, ticket: Ticket) -> _Account:
        account = self._accounts[ticket.client]
        account.num_running -= 1
        self._num_running -= 1
        return account

    def _remove(self, account: _Account, ticket: Ticket) -> None:
        account.tickets.remove(sort_key(ticket))
        self.size -= 1
        self._lengths.add(ticket.client, -1)

    def _place(self, account: _Account) -> None:
        """Update the account's positions."""
        placed = None
        if account.tickets.size:
            by_served, by_age = (account.served, account.number), sort_key(next(iter(account.tickets)))
            placed = by_served, by_age, account.tickets.excluded_by_all, account.tickets.homes
        if placed == account.placed:
            return
        if account.placed is not None:
            self._by_served.remove(account.placed[0])
            self._by_age.remove(account.placed[1])
        if placed is not None:
            self._by_served.add(placed[0], account, *placed[2:])
            self._by_age.add(placed[1], account, *placed[2:])
        account.placed = placed

    def _rest(self, account: _Account) -> None:
        """Drop the account if it is idle and its counter has no effect; then others, if too many are idle."""
        if not account.tickets.size and not account.num_running:
            self._numbers += 1
            account.idle = self._numbers
            heapq.heappush(self._idle, (account.served, account.idle, account))
        for _ in range(_DROPS_AT_ONCE):
            if self._idle and (self._idle[0][0] <= self._last_served or len(self._idle) > MAX_IDLE):
                _, number, idle = heapq.heappop(self._idle)
                if idle.idle == number:
                    del self._accounts[idle.client]
