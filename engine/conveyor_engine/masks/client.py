"""The engine process's side of the processes for grammars. Nothing here waits for them, except `wait`, briefly.

`supervisor` has the processes and a thread that reads what they send. An answer whose mask the walker was building when
the walker ended has ended it, so the answer ends with an error. All other answers are opened again, with their tokens.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Final

from conveyor_engine.masks import limits
from conveyor_engine.masks.answers import Answer, Answers
from conveyor_engine.masks.board import Board
from conveyor_engine.masks.messages import (
    Broke,
    Cancel,
    Compiled,
    Loaded,
    Started,
    Try,
    encode,
    from_server_decoder,
    from_walker_decoder,
)
from conveyor_engine.masks.supervisor import Supervisor
from conveyor_engine.masks.verdicts import TOO_COSTLY, Order, Verdict, Verdicts
from conveyor_engine.scheduling.constraint import Constraint

_POLL_SECONDS: Final = 0.00005


class Masks:
    """Compiles grammars and builds masks. Called by the engine's loop, and by the supervisor's thread."""

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_rows: int,
        on_news: Callable[[], None],
    ) -> None:
        """tokenizer: its file. on_news: called when a grammar is compiled, or a mask is ready while the loop sleeps.

        It is called by the supervisor's thread, and must not wait.
        """
        arguments = ["--slots", str(num_rows), "--tokenizer", str(tokenizer), "--vocab-size", str(vocab_size)]
        arguments += ["--ends", *map(str, eos_token_ids)]
        self._on_news = on_news
        self._lock = threading.RLock()
        self._board = Board.create(num_rows, -(-vocab_size // 8))
        numbers = count(1)
        self._answers = Answers(self._board, numbers, self._lock)
        self._verdicts = Verdicts(numbers)
        self._supervisor = Supervisor(self, self._board, arguments, self._lock)
        self._problem = ""  # why no grammar can be followed
        self.walker_pid = 0  # of the walker that started last

    # --- called by the loop ---

    def judge(self, key: bytes, grammar: str) -> Verdict | None:
        """Return the verdict; None if the grammar has to be tried first. `on_news` is called when there is one.

        key: from `key_of`.
        """
        with self._lock:
            if self._problem:
                return Verdict(self._problem)
            if (verdict := self._verdicts.find(key)) is not None:
                return verdict
            if (order := self._verdicts.add(key, grammar)) is not None:
                self._supervisor.start()
                order.num_starts += 1
                self._try(order)
        return None

    def cancel(self, key: bytes) -> None:
        """Stop trying this grammar, because nobody waits for it any more."""
        with self._lock:
            if (order := self._verdicts.cancel(key)) is not None:
                self._supervisor.send_to_server(encode(Cancel(order.number)))

    def follow(self, grammar: str) -> Answer:
        """Return an answer that has not begun."""
        return Answer(self._answers, grammar)

    def flush(self) -> None:
        """Send the walker all that has happened."""
        with self._lock:
            if self._answers.messages and self._supervisor.has_walker:
                self._supervisor.send_to_walker(b"".join(map(encode, self._answers.messages)))
                self._answers.messages.clear()

    def wait(self, constraints: Collection[Constraint], seconds: float) -> None:
        """Wait until these are ready, but not longer than this."""
        end = time.monotonic() + seconds
        while not all(constraint.is_ready for constraint in constraints) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def sleep(self) -> None:
        """Let the next mask call `on_news`."""
        self._board.loop_sleeps = True

    # --- called by the supervisor ---

    def handle_server(self, payload: bytes) -> None:
        """Handle a verdict, or the start of the fork server."""
        message = from_server_decoder.decode(payload)
        if isinstance(message, Loaded):
            self._problem = message.problem
            if message.problem:
                self._verdicts.conclude_all(Verdict(message.problem))
        elif (order := self._verdicts.find_order(message.number)) is not None:
            if message.problem:
                self._verdicts.conclude(order, Verdict(message.problem, message.is_too_costly))
            else:
                self._compile(order, message.num_bytes)
        self._on_news()

    def handle_walker(self, payload: bytes) -> None:
        """Handle the end of a compilation or of an answer, or the start of the walker."""
        message = from_walker_decoder.decode(payload)
        if isinstance(message, Started):
            self.walker_pid = message.pid
        elif isinstance(message, Compiled):
            if (order := self._verdicts.find_order(message.number)) is not None:
                self._verdicts.conclude(order, Verdict(""))
        elif isinstance(message, Broke):
            self._answers.end_broken(message)
        self._on_news()

    def resend_to_server(self) -> None:
        """Send the grammars that have not been tried."""
        for order in self._verdicts.list_orders(are_tried=False):
            self._try(order)

    def resend_to_walker(self) -> None:
        """Open all answers again, and compile the grammars that have been tried."""
        self._answers.reopen_all()
        self._answers.messages += [order.compilation() for order in self._verdicts.list_orders(are_tried=True)]
        self.flush()

    def end_work(self, tickets: set[int]) -> None:
        """End the answers and the grammars that the walker was working on when it ended."""
        for answer in self._answers.find_with(tickets):
            answer.fail(limits.TOO_COSTLY_TO_FOLLOW, is_too_costly=True)
            self._verdicts.count_death(answer.grammar)
        for number in tickets:
            if (order := self._verdicts.find_order(number)) is not None:
                self._verdicts.conclude(order, TOO_COSTLY)
        self._on_news()

    def end_server(self) -> bool:
        """Count a start for each grammar. Returns whether the fork server can be started again."""
        self._verdicts.restart()
        self._on_news()
        return not self._problem

    def _try(self, order: Order) -> None:
        self._supervisor.send_to_server(encode(Try(order.number, order.grammar)))

    def _compile(self, order: Order, num_bytes: int) -> None:
        """Send the walker a grammar that has been tried."""
        order.is_tried, order.num_bytes = True, num_bytes
        order.num_starts += 1
        self._answers.messages.append(order.compilation())
        self.flush()
