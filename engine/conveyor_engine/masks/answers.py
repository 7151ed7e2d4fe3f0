"""The answers that follow grammars, and the messages that tell the walker of them. Used by `client`.

The walker has the state of each answer in its grammar. This module keeps the tokens of each answer, so that a new
walker can open it again.
"""

from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager

from conveyor_engine.masks.board import Board
from conveyor_engine.masks.messages import Accept, Broke, Close, Open, ToWalker
from conveyor_engine.scheduling.constraint import Constraint


class Answers:
    """The answers that have a slot, and the messages for the walker. All methods are called with the lock."""

    def __init__(self, board: Board, tickets: Iterator[int], lock: AbstractContextManager[bool]) -> None:
        self.board = board
        self.lock = lock
        self.messages: list[ToWalker] = []  # not sent yet
        self.tickets = tickets
        self._free_slots = list(range(board.num_slots - 1, -1, -1))
        self._by_slot: dict[int, Answer] = {}

    def give_slot(self, answer: "Answer") -> None:
        """Open the answer in a free slot."""
        answer.slot, answer.ticket = self._free_slots.pop(), next(self.tickets)
        self._by_slot[answer.slot] = answer
        self.messages.append(answer.opening())

    def take_slot(self, answer: "Answer") -> None:
        """Close the answer."""
        del self._by_slot[answer.slot]
        self._free_slots.append(answer.slot)
        self.messages.append(Close(answer.slot))
        answer.slot = -1

    def send_token(self, answer: "Answer", token_id: int) -> None:
        """Give the answer a new ticket, and send its token with those of other answers."""
        answer.ticket = next(self.tickets)
        if not self.messages or not isinstance(self.messages[-1], Accept):
            self.messages.append(Accept([]))
        last = self.messages[-1]
        assert isinstance(last, Accept)
        last.tokens.append((answer.slot, answer.ticket, token_id))

    def reopen_all(self) -> None:
        """Replace the messages by those that a new walker needs."""
        self.messages[:] = [each.opening() for each in self._by_slot.values() if each.failure is None]

    def find_with(self, tickets: set[int]) -> "list[Answer]":
        """Return the answers that have these tickets."""
        return [each for each in self._by_slot.values() if each.ticket in tickets]

    def end_broken(self, message: Broke) -> None:
        """End the answer that cannot be continued, unless it has already gone on or left its slot."""
        answer = self._by_slot.get(message.slot)
        if answer is not None and answer.ticket == message.ticket:
            answer.fail(message.problem, is_too_costly=message.is_too_costly)


class Answer(Constraint):
    """The state of one answer in its grammar, which the walker has. It has a slot while its request has a row."""

    def __init__(self, answers: Answers, grammar: str) -> None:
        self._answers = answers
        self._board = answers.board
        self.grammar = grammar
        self.tokens = array("I")
        self.slot = -1
        self.ticket = -1
        self._failure: tuple[str, bool] | None = None

    def opening(self) -> Open:
        """Return the message that opens the answer after its tokens."""
        return Open(self.slot, self.ticket, self.grammar, self.tokens.tolist())

    def open(self) -> None:
        with self._answers.lock:
            self._answers.give_slot(self)

    def close(self) -> None:
        with self._answers.lock:
            if self.slot >= 0:
                self._answers.take_slot(self)

    def accept(self, token_id: int) -> None:
        with self._answers.lock:
            self.tokens.append(token_id)
            self._answers.send_token(self, token_id)

    @property
    def is_ready(self) -> bool:
        return self._failure is not None or self._board.has(self.slot, self.ticket)

    @property
    def failure(self) -> tuple[str, bool] | None:
        return self._failure

    def fail(self, problem: str, *, is_too_costly: bool) -> None:
        """Record that the answer cannot go on."""
        self._failure = problem, is_too_costly

    @property
    def is_complete(self) -> bool:
        return self._board.is_complete(self.slot)

    def build_mask(self) -> bytes:
        return self._board.read(self.slot)
