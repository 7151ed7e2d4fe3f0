"""Computes the latencies of a run's requests, and compares a run with an objective to runs with fixed limits. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from conveyor_bench.modes.running import Clock
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, RequestOutput
from conveyor_load.percentiles import percentile

_TOLERANCE = 0.1


@dataclass(slots=True)
class Felt:
    """The latencies of a run's requests, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)  # of the log
    limits: list[tuple[int, int]] = field(default_factory=list)  # (rows, prompt tokens) of a step, after each change
    _last: dict[str, float] = field(default_factory=dict)

    def add(self, outputs: Iterable[RequestOutput], arrivals: dict[str, float], now: float) -> None:
        """Add the outputs of one step."""
        for output in outputs:
            if not output.new_token_ids:
                continue
            before = self._last.get(output.request_id)
            if before is None:
                self.first.append(now - arrivals[output.request_id])
            else:
                self.between.append(now - before)
            self._last[output.request_id] = now
            self.tokens += len(output.new_token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def p95(self, name: str) -> float:
        """Return the 95th percentile of `first` or `between`; 0 without values, which a very short run may have."""
        values: list[float] = getattr(self, name)
        return percentile(values, 95)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shape of traffic: the run with the objective, and runs with fixed limits, by rows and tokens of a step."""

    name: str
    objective: float  # seconds between two tokens
    steered: Felt
    fixed: Mapping[tuple[int, int], Felt]

    @property
    def best(self) -> tuple[int, int] | None:
        """The fixed limits with the most tokens per second, among those that hold the objective; None if none do."""
        holding = [limits for limits, felt in self.fixed.items() if felt.p95("between") <= self.objective]
        return max(holding, key=lambda limits: self.fixed[limits].tokens_per_second, default=None)

    @property
    def share_of_best(self) -> float:
        """The throughput with the objective, as a share of the throughput with the best fixed limits."""
        assert self.best is not None
        return self.steered.tokens_per_second / self.fixed[self.best].tokens_per_second

    @property
    def p95_of_objective(self) -> float:
        return self.steered.p95("between") / self.objective

    @property
    def misses(self) -> bool:
        """Whether the steered run misses the objective, or the throughput of the best fixed limits, by over a tenth.

        False if no fixed limits hold the objective.
        """
        if self.best is None:
            return False
        return self.p95_of_objective > 1 + _TOLERANCE or self.share_of_best < 1 - _TOLERANCE

    def describe(self) -> str:
        """Return a line of figures."""
        line = (
            f"shape={self.name} p95_of_objective={self.p95_of_objective:.3f} "
            f"tokens_per_second={self.steered.tokens_per_second:.1f} moves={max(0, len(self.steered.limits) - 1)}"
        )
        if self.best is None:
            return f"{line} best_fixed=none"
        held = self.fixed[self.best].p95("between") / self.objective
        return (
            f"{line} best_fixed={self.best[0]}x{self.best[1]} of_best={self.share_of_best:.3f} "
            f"best_p95_of_objective={held:.3f}"
        )


def serve(core: EngineCore, clock: Clock, requests: Sequence[EngineRequest], felt: Felt) -> None:
    """Run all requests, which are in order of arrival, until the last answer."""
    arrivals = {request.request_id: request.arrival_time for request in requests}
    pending = list(reversed(requests))
    while pending or core.has_unfinished():
        now = clock.now()
        while pending and pending[-1].arrival_time <= now:
            core.add_request(pending.pop())
        if not core.has_unfinished():
            clock.wait_until(pending[-1].arrival_time)
            continue
        felt.add(core.step(now), arrivals, clock.now())
        if core.steering is not None:
            limits = (core.steering.limits.num_rows, core.steering.limits.prompt_tokens)
            if not felt.limits or felt.limits[-1] != limits:
                felt.limits.append(limits)
    felt.seconds = clock.now()
