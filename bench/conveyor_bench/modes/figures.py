"""Computes the figures of a run of requests, for clients and operators, as plain numbers. Used by `running`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, EngineStats, FinishReason, RequestOutput
from conveyor_load.percentiles import percentile


@dataclass(slots=True)
class Answer:
    """The times of one request, in seconds of the run's clock."""

    arrival: float
    scheduled: float = 0.0
    first: float = -1.0
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Observed:
    """Observes a run: its answers, and sums over its steps."""

    answers: dict[str, Answer] = field(default_factory=dict)
    busy_seconds: float = 0.0
    live_row_seconds: float = 0.0  # sum of a step's seconds x its rows that compute for an unfinished request
    most_running: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0  # of the latest step
    reserved_token_steps: int = 0  # as if each admitted request reserved the maximum length, like contiguous caches
    stats: EngineStats = field(default_factory=EngineStats)
    _longest: int = 0
    _before: tuple[int, int] = (0, 0)

    def begin(self, requests: Sequence[EngineRequest], longest_total_tokens: int) -> None:
        """Record all requests that will arrive."""
        self.answers = {request.request_id: Answer(request.arrival_time) for request in requests}
        self._longest = longest_total_tokens

    def before_step(self, core: EngineCore) -> None:
        """Record which requests run."""
        self._before = _running(core)

    def after_step(self, core: EngineCore, outputs: Sequence[RequestOutput], began: float, ended: float) -> None:
        """Record the outputs of a step. Raises RuntimeError if a request failed."""
        live, running = (max(pair) for pair in zip(self._before, _running(core), strict=True))
        self.most_running = max(self.most_running, running)
        self.step_seconds = ended - began
        self.busy_seconds += self.step_seconds
        self.live_row_seconds += live * self.step_seconds
        self.reserved_token_steps += running * self._longest
        self.computed_tokens += core.stats().step_num_tokens
        for output in outputs:
            if output.finish_reason not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"request {output.request_id} ended with {output.finish_reason}: {output.message}")
            answer = self.answers[output.request_id]
            answer.first = ended if answer.first < 0 else answer.first
            answer.scheduled, answer.last = output.scheduled_time, ended
            answer.tokens += len(output.new_token_ids)

    def end(self, core: EngineCore, now: float) -> None:
        """Record that all requests have ended."""
        self.seconds, self.stats = now, core.stats()

    def figures(self) -> dict[str, float]:
        """Return all figures that the page shows."""
        stats, answers = self.stats, list(self.answers.values())
        return {
            **spread(answers, self.seconds),
            "padding_waste": stats.padding_tokens / self.computed_tokens,
            "kv_waste": 1 - stats.kv_live_token_steps / stats.kv_allocated_token_steps,
            "kv_waste_if_reserved": max(0.0, 1 - stats.kv_live_token_steps / self.reserved_token_steps),
            "utilisation": self.live_row_seconds / (self.most_running * self.seconds),
            "busy": self.busy_seconds / self.seconds,
            "most_running": self.most_running,
            "preemptions": stats.num_preemptions,
            "steps": stats.num_steps,
        }


def _running(core: EngineCore) -> tuple[int, int]:
    """Return (number of rows that still compute, number of admitted requests)."""
    running = core.scheduler.running
    return sum(request.finished is None for request in running), len(running)


def spread(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Return the throughput, and percentiles of the answers' times."""
    tokens = sum(answer.tokens for answer in answers)
    figures = {"output_tokens_per_second": tokens / seconds, "seconds": seconds}
    figures |= {"requests": len(answers), "output_tokens": tokens}
    times = {
        "ttft": [answer.first - answer.arrival for answer in answers],
        "latency": [answer.last - answer.arrival for answer in answers],
        "queue": [answer.scheduled - answer.arrival for answer in answers],
    }
    for name, values in times.items():
        figures |= {f"{name}_p{share}": percentile(values, share) for share in (50, 95, 99)}
    rates = [answer.tokens / (answer.last - answer.scheduled) for answer in answers]
    return {**figures, "tokens_per_second_per_user": percentile(rates, 50)}
