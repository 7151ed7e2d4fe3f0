"""Moves the limits of rows and of prompt tokens so that latencies stay within their objectives. START HERE.

Every `STEPS_PER_LOOK` steps, `Steering` fits the cost of steps. Then it chooses the largest limits whose predicted
times do not exceed the objectives, each multiplied by a factor of its own. Measured times correct the factors. If the
P95 of these times is above an objective, the objective's factor is lowered until the limits go down. If the P95 is far
below the objective while requests wait, the factor is raised. No running or waiting request is dropped because of a
prediction.

`loop.core` builds it if the configuration has objectives. Single-threaded; the caller passes the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.objectives.candidates import Candidates, Objectives, Traffic
from conveyor_engine.objectives.readings import ENOUGH_REQUESTS, ENOUGH_STEPS, FIRST_FACTOR, Readings
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.policy import DYNAMIC_WINDOW_SECONDS
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.step_cost import Coefficients, StepCost
from conveyor_engine.wire.request import EngineStats, ModelFacts
from conveyor_protocol.limit_reasons import LimitReason

STEPS_PER_LOOK: Final = 8
_MISSED, _CLOSE, _SLACK = 1.0, 0.9, 0.8  # ratios of the P95 to its objective
_NEAR: Final = 2.0  # up to this ratio the lowest limits stay, because higher ones miss the objective by more
_DECREASE_LEAST, _DECREASE_MOST, _INCREASE = 0.95, 0.7, 0.05
_FACTOR_LEAST, _FACTOR_MOST = 0.1, 4.0
# If the P95 falls below this share of the highest P95 since `_give_up`, steps have become cheaper.
_CHEAPER: Final = 0.8
_PATIENCE_MAX: Final = 64
_LOG_SECONDS: Final = 1.0  # minimum time between two log lines

Ratios = list[tuple[float, Readings]]  # (P95 divided by the objective, its readings)


class Steering:
    """Owns the factors and moves `limits`. `observe` is called after each step."""

    def __init__(
        self,
        objectives: Objectives,
        config: EngineConfig,
        facts: ModelFacts,
        graph_sizes: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        """say: called with a log line when the limits change."""
        window = DYNAMIC_WINDOW_SECONDS if config.batching_window_seconds is None else config.batching_window_seconds
        waits = config.batching_mode == "dynamic"
        self.limits = Limits.declared(facts)
        self.reason: LimitReason = LimitReason.DECLARED
        self.num_moves: dict[str, int] = {}
        self._declared = Limits.declared(facts)
        self._candidates = Candidates(objectives, facts, graph_sizes, window if waits else 0.0)
        self._first = _make_readings(objectives.time_to_first_token, ENOUGH_REQUESTS)
        self._between = _make_readings(objectives.inter_token_latency, ENOUGH_STEPS)
        self._latency = _make_readings(objectives.latency, ENOUGH_REQUESTS)
        self._readings = [each for each in (self._first, self._between, self._latency) if each is not None]
        self._cost, self._traffic = StepCost(), Traffic()
        self._say, self._said_at = say, 0.0
        self._patience = 1  # number of looks between a change of limits and the next increase
        self._num_looks = 0  # since the last change of limits
        self._highest = 0.0  # the highest ratio of a P95 to its objective since `_give_up`
        self._num_steps = 0
        self._last_end: float | None = None  # end of the previous step; None if the engine was idle since
        self._is_pressed = False  # whether requests waited or the batch was at its limit since the last look

    def observe(self, step: Step, ended: float, num_running: int, num_waiting: int) -> None:
        """Record a step that has ended. `num_running`, `num_waiting`: the current numbers of requests."""
        began = step.planned_at if self._last_end is None else max(step.planned_at, self._last_end)
        num_rows, prompt_tokens = len(step.work), step.num_prompt_tokens
        self._cost.observe(num_rows, prompt_tokens, ended - began - step.draft_seconds)
        self._traffic.observe(num_rows, step.num_decoding, prompt_tokens)
        if num_rows <= self.limits.num_rows:  # otherwise the times belong to an earlier, higher limit
            self._read(step, ended)
        self._is_pressed |= num_waiting > 0 or num_rows >= self.limits.num_rows
        self._last_end = ended if num_running else None
        self._num_steps += 1
        if self._num_steps % STEPS_PER_LOOK == 0:
            self._look(ended)
            self._is_pressed = False

    def report(self, stats: EngineStats) -> EngineStats:
        """Return the statistics with the current limits. While the reason is DECLARED, the limits are None."""
        is_known = self.reason != LimitReason.DECLARED
        return msgspec.structs.replace(
            stats,
            max_running=self.limits.num_rows if is_known else None,
            max_prompt_tokens=self.limits.prompt_tokens if is_known else None,
            limit_reason=self.reason,
            limit_moves=dict(self.num_moves),
        )

    def _read(self, step: Step, ended: float) -> None:
        """Record the latencies of the step's requests."""
        if self._between is not None and step.num_decoding and self._last_end is not None:
            self._between.add(ended - self._last_end, step.num_decoding)
        if self._first is None and self._latency is None:
            return
        for work in step.work:
            request = work.request
            if self._latency is not None:
                self._latency.add(ended - request.place_time)
            elif self._first is not None and work.num_logits and request.num_output_tokens == 1:
                self._first.add(ended - request.place_time)
                self._traffic.observe_prompt(request.num_prompt_tokens - request.num_cached_tokens)

    def _look(self, now: float) -> None:
        self._cost.fit()
        self._num_looks += 1
        if (cost := self._cost.coefficients) is None:
            return
        ratios = [(ratio, each) for each in self._readings if (ratio := each.find_ratio()) is not None]
        worst = max((ratio for ratio, _ in ratios), default=None)
        if self.reason == LimitReason.UNREACHABLE:
            self._try_again(cost, worst, now)
        elif worst is not None and worst > _MISSED:
            self._miss(cost, ratios, worst, now)
        elif self._is_pressed:
            self._follow(cost, ratios, worst, now)

    def _miss(self, cost: Coefficients, ratios: Ratios, worst: float, now: float) -> None:
        """Lower the factors of missed objectives until the limits go down.

        If even the lowest limits miss an objective by far, or miss the time to the first token, give up for a while.
        """
        missed = [(ratio, each) for ratio, each in ratios if ratio > _MISSED]
        while not self._is_less(chosen := self._choose(cost) or self._candidates.floor):
            if chosen == self._candidates.floor or min(each.factor for _, each in missed) < _FACTOR_LEAST:
                if worst <= _NEAR and all(each is not self._first for _, each in missed):
                    return
                self._give_up([each for _, each in missed], worst, now)
                return
            for ratio, each in missed:
                each.factor *= min(_DECREASE_LEAST, max(_DECREASE_MOST, 1 / ratio))
            missed = [(1.0, each) for _, each in missed]
        self._move(chosen, LimitReason.MISSED, worst, now)

    def _give_up(self, missed: list[Readings], worst: float, now: float) -> None:
        """Return to the declared limits, because no limits meet the missed objectives.

        The present limits stay if only the time to the first token is missed, and the time between tokens has an
        objective too.
        """
        for each in missed:
            each.factor = FIRST_FACTOR
            each.clear()
        if missed != [self._first] or self._between is None:
            self._highest = 0.0
            self._move(self._declared, LimitReason.UNREACHABLE, worst, now)

    def _follow(self, cost: Coefficients, ratios: Ratios, worst: float | None, now: float) -> None:
        """Follow the current fit. Increases wait for `_patience` looks. If there is slack, the factors grow."""
        is_patient = self._num_looks >= self._patience
        if is_patient and worst is not None and worst < _SLACK and self.limits != self._declared:
            for _, each in ratios:
                each.factor = min(_FACTOR_MOST, each.factor + _INCREASE)
            self._num_looks = 0
        chosen = self._choose(cost)
        if chosen is None:
            return
        if self._is_less(chosen):
            if self._candidates.exceeds(self.limits, cost, self._traffic, self._targets()):
                self._move(chosen, LimitReason.PREDICTED, worst, now)
        elif is_patient and self._is_more(chosen) and (worst is None or worst < _CLOSE):
            self._move(chosen, LimitReason.SLACK, worst, now)

    def _try_again(self, cost: Coefficients, worst: float | None, now: float) -> None:
        """Keep the declared limits until they meet the objectives, or until other limits are predicted to meet them.

        Other limits are tried only after `_patience` looks.

        Steps of one size do not show what smaller steps would cost. So if steps have become cheaper, smaller limits are
        tried.
        """
        self._highest = max(self._highest, worst or 0.0)
        if worst is not None and worst < _CLOSE:
            self._patience = 1
            self._move(self._declared, LimitReason.DECLARED, worst, now)
        elif self._num_looks >= self._patience:
            chosen = self._choose(cost)
            if chosen is None and worst is not None and worst < _CHEAPER * self._highest:
                self._patience, chosen = 1, self._candidates.floor
            if chosen is not None and chosen != self._declared:
                self._move(chosen, LimitReason.PREDICTED, worst, now)

    def _targets(self) -> Objectives:
        kept = (self._first, self._between, self._latency)
        return Objectives(*(None if each is None else each.target_seconds for each in kept))

    def _choose(self, cost: Coefficients) -> Limits | None:
        return self._candidates.choose(cost, self._traffic, self._targets())

    def _is_less(self, chosen: Limits) -> bool:
        """Return whether `chosen` has fewer rows, or as many rows and at least an eighth fewer prompt tokens."""
        now = self.limits
        is_less = chosen.prompt_tokens <= now.prompt_tokens * 7 / 8
        return chosen.num_rows < now.num_rows or (chosen.num_rows == now.num_rows and is_less)

    def _is_more(self, chosen: Limits) -> bool:
        now = self.limits
        is_more = chosen.prompt_tokens >= now.prompt_tokens * 9 / 8
        return chosen.num_rows > now.num_rows or (chosen.num_rows == now.num_rows and is_more)

    def _move(self, chosen: Limits, reason: LimitReason, worst: float | None, now: float) -> None:
        """Change the limits towards `chosen`, and drop all readings.

        The declared limits are restored at once. Otherwise prompt tokens change by at most a factor of two. Rows change
        by at most the same factor, or to the next size.
        """
        old = replace(self.limits)
        if reason in (LimitReason.UNREACHABLE, LimitReason.DECLARED):
            self.limits.num_rows, self.limits.prompt_tokens = chosen.num_rows, chosen.prompt_tokens
        else:
            self.limits.num_rows = self._candidates.clip_rows(chosen.num_rows, old.num_rows)
            self.limits.prompt_tokens = min(2 * old.prompt_tokens, max(old.prompt_tokens // 2, chosen.prompt_tokens))
        self.reason, self._num_looks = reason, 0
        if reason in (LimitReason.MISSED, LimitReason.UNREACHABLE):
            self._patience = min(_PATIENCE_MAX, 2 * self._patience)
        self.num_moves[reason] = self.num_moves.get(reason, 0) + 1
        for readings in self._readings:
            readings.clear()
        if now - self._said_at >= _LOG_SECONDS:
            self._said_at = now
            self._say(_describe(reason, old, self.limits, worst))


def _make_readings(objective_seconds: float | None, num_enough: int) -> Readings | None:
    return None if objective_seconds is None else Readings(objective_seconds, num_enough)


def _describe(reason: str, old: Limits, new: Limits, worst: float | None) -> str:
    felt = "" if worst is None else f" p95_of_objective={worst:.2f}"
    return (
        f"event=limits_moved reason={reason} rows={old.num_rows}->{new.num_rows} "
        f"prompt_tokens={old.prompt_tokens}->{new.prompt_tokens}{felt}"
    )
