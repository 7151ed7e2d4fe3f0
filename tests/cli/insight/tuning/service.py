"""A simulated service: `limit` requests run at once, each in a time that grows with the limit."""

from conveyor_insight.tuning.candidates import Candidate
from conveyor_insight.tuning.sweep import CannotRun
from conveyor_load.figures import Figures, Spread
from conveyor_load.requests import Target


class Arithmetic:
    """Serves up to `capacity` requests per second for each candidate. Above that, the latency rises steeply."""

    def __init__(self, capacity: dict[Candidate, float]) -> None:
        self._capacity = capacity
        self.applied: list[Candidate] = []
        self.measured: list[tuple[int, float]] = []

    async def apply(self, candidate: Candidate) -> Target:
        self.applied.append(candidate)
        if candidate not in self._capacity:
            raise CannotRun("KVBudgetTooSmall: raise it")
        return Target("http://example", "qwen")

    async def measure(self, _: Target, candidate: Candidate, rate: float) -> Figures:
        self.measured.append((candidate.max_batch_size, rate))
        return make_figures(rate, 0.1 if rate <= self._capacity[candidate] else 5.0)


def make_figures(rate: float, latency: float) -> Figures:
    return Figures(
        offered=rate,
        requests=100,
        failed=0,
        problems=(),
        seconds=30,
        goodput=rate if latency < 1 else rate / 2,
        input_tokens=rate * 100,
        output_tokens=rate * 10,
        ttft=Spread(latency / 2, latency / 2, latency / 2),
        itl=Spread(0.01, 0.02, 0.03),
        latency=Spread(latency, latency, latency),
        begun_share=1.0,
    )
