import asyncio
import math

from tests.operator.stage import Stage

from conveyor_operator.pace import Pace


async def test_a_burst_starts_at_once_and_what_follows_keeps_the_rate() -> None:
    pace = Pace(50)
    waits = await asyncio.gather(*(pace.wait() for _ in range(60)))
    assert waits[:50] == [0.0] * 50
    assert waits[50:] == sorted(waits[50:])
    assert 0.1 < waits[-1] <= 10 / 50


async def test_no_limit_never_waits() -> None:
    pace = Pace(math.inf)
    assert await asyncio.gather(*(pace.wait() for _ in range(1000))) == [0.0] * 1000


def test_an_operator_with_a_limit_makes_no_more_calls_and_finishes(stage: Stage) -> None:
    per_second = 4
    with stage.operator(api_calls_per_second=per_second):
        stage.space.make_service()
        stage.space.wait_observed("qwen")
    own = [c for c in stage.proxy.calls if c.verb not in ("watch", "list") and not c.resource.startswith("/")]
    times = sorted(call.at for call in own)
    for first, last in zip(times, times[3 * per_second :], strict=False):
        assert last - first > 1, "a burst of one second, and two seconds' worth after it"
