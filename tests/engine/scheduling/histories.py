"""Runs random histories of a scheduler until every hardship has occurred. Common parts of both tasks' histories."""

from collections import Counter
from collections.abc import Collection

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tests.engine.executors import FailsLate, Wired
from tests.engine.scheduling.turns import Turns

from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.request import FinishReason


class SchedulerHistory(RuleBasedStateMachine):
    """The base class of histories.

    Subclasses begin, add requests and `step`. `added` and `ended` have requests' ids.
    """

    mode = "continuous"
    happened: Counter[str]  # over all histories of the mode
    now: float
    scheduler: Scheduler
    executor: FailsLate | Wired
    added: Collection[str]
    ended: dict[str, FinishReason]
    turns: Turns
    drains: bool

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> None:
        raise NotImplementedError

    def finish(self, most_steps: int) -> None:
        """Run steps until no request is left."""
        if self.drains:
            self.scheduler.drain()
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished():
                break
            wakeup = self.scheduler.next_wakeup(self.now)
            assert wakeup is not None, "unfinished requests, and nothing will ever happen"
            self.now = max(self.now, wakeup)
            self.step()
        assert set(self.ended) == set(self.added), "everybody gets exactly one last output"
        if isinstance(self.executor, FailsLate):
            self.happened["late errors"] += self.executor.num_errors
        self.happened["turns taken from others"] += self.turns.num_overtaken
        self.happened["better levels"] += self.turns.num_yielded


def run_histories(
    machine: type[RuleBasedStateMachine], happened: Counter[str], hardships: set[str], number: int = 80
) -> None:
    """Run `number` random histories, and again until every hardship has occurred in one of them."""
    for _ in range(5):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            machine,
            settings=settings(
                max_examples=number,
                stateful_step_count=40,
                deadline=None,
                derandomize=False,  # not the same histories again
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if hardships <= set(+happened):
            break
