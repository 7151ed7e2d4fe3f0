"""Runs random histories of a scheduler until they have met what makes them hard."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_histories(machine: type[RuleBasedStateMachine], happened: Counter[str], hardships: set[str]) -> None:
    """80 random histories, and again until every hardship was met in one of them."""
    for _ in range(5):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            machine,
            settings=settings(
                max_examples=80,
                stateful_step_count=40,
                deadline=None,
                derandomize=False,  # not the same histories again
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if hardships <= set(+happened):
            break
