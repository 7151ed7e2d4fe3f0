"""What the HTTP side makes of the engine process's word, without the process."""

import pytest
from tests.engine.builders import make_facts

from conveyor_engine.async_engine import STEP_STUCK_SECONDS, AsyncEngine
from conveyor_engine.config import EngineConfig
from conveyor_engine.messages import Heartbeat, Ready


@pytest.mark.parametrize(
    ("warmup_seconds", "longest"), [(0.0, STEP_STUCK_SECONDS), (1.0, STEP_STUCK_SECONDS), (60.0, 300.0)]
)
def test_a_step_may_take_five_times_as_long_as_the_longest_of_the_warm_up(
    warmup_seconds: float, longest: float
) -> None:
    engine = AsyncEngine(EngineConfig(model="m"))
    engine._take(Ready(make_facts(), warmup_seconds))
    engine._take(Heartbeat(longest - 1))
    assert engine.is_alive
    engine._take(Heartbeat(longest + 1))
    assert not engine.is_alive
