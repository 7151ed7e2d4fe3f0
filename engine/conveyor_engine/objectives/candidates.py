"""Chooses the largest limits that meet the objectives, from the cost of steps and the traffic.

The time between two tokens is one step. The time to a first token is the step that runs when the request arrives, plus
one step for each piece of the prompt. If requests take only one step, their latency is the sum of the running step, the
window and their own step. Used by `steering` and `loop.core`. Pure.
"""

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.step_cost import Coefficients
from conveyor_engine.wire.request import ModelFacts

_FLOOR: Final = 1 / 8  # lowest limit of rows, as a share of the declared limit
_TOKENS_FLOOR: Final = 1 / 64  # lowest limit of prompt tokens, as a share of the declared limit ...
_SMALLEST_CHUNK: Final = 16  # ... but at least this number
_NUM_PROMPTS: Final = 128
_LATELY_STEPS: Final = 512
_BAND: Final = 1.05
_HEADROOM: Final = 1.25  # a step has room for this factor times the mean number of prompt tokens


@dataclass(frozen=True, slots=True)
class Objectives:
    """The seconds that 95 % of requests or tokens should not exceed. None: no objective."""

    time_to_first_token: float | None
    inter_token_latency: float | None
    latency: float | None

    @classmethod
    def of(cls, config: EngineConfig) -> "Objectives | None":
        """Return the configuration's objectives; None if it has none."""
        objectives = cls(
            config.objective_time_to_first_token_seconds,
            config.objective_inter_token_latency_seconds,
            config.objective_latency_seconds,
        )
        return None if objectives == cls(None, None, None) else objectives


class Traffic:
    """Statistics of the traffic: rows, decodes and prompt tokens of recent steps, and the lengths of prompts."""

    def __init__(self) -> None:
        self._rows = self._decodes = self._prompt_tokens = 0.0
        self._prompts: deque[int] = deque(maxlen=_NUM_PROMPTS)

    def observe(self, num_rows: int, num_decodes: int, prompt_tokens: int) -> None:
        """Record one step."""
        weight = 1 / _LATELY_STEPS
        self._rows += weight * (num_rows - self._rows)
        self._decodes += weight * (num_decodes - self._decodes)
        self._prompt_tokens += weight * (prompt_tokens - self._prompt_tokens)

    def observe_prompt(self, num_tokens: int) -> None:
        """Record a computed prompt. `num_tokens`: its tokens that were not cached."""
        self._prompts.append(num_tokens)

    @property
    def num_rows(self) -> float:
        """Return the mean number of rows of recent steps."""
        return self._rows

    @property
    def prompt_tokens(self) -> float:
        """Return the mean number of prompt tokens of recent steps."""
        return self._prompt_tokens

    @property
    def prompt_tokens_per_decode(self) -> float:
        return self._prompt_tokens / self._decodes if self._decodes else 0.0

    @property
    def tokens_per_row(self) -> float:
        return self._prompt_tokens / self._rows if self._rows else 0.0

    @property
    def long_prompt_tokens(self) -> int:
        """Return the P95 of the prompts' lengths; 1 before the first prompt."""
        return sorted(self._prompts)[len(self._prompts) * 95 // 100] if self._prompts else 1


def list_sizes(max_num_seqs: int, graph_sizes: Sequence[int]) -> list[int]:
    """Return the possible limits of rows, ascending.

    With graphs these are the graphs' sizes, to which steps are padded.

    Neighbours differ by at least an eighth, except for the declared limit, which is always in the list. No limit is
    below an eighth of the declared one.
    """
    least = max(1, math.ceil(max_num_seqs * _FLOOR))
    sizes = [least]
    for size in graph_sizes or range(least, max_num_seqs):
        if size >= sizes[-1] * 9 / 8 and size < max_num_seqs:
            sizes.append(size)
    if graph_sizes and least not in graph_sizes:
        sizes = sizes[1:]
    return [*sizes, max_num_seqs] if max_num_seqs not in sizes else sizes


class Candidates:
    """Chooses limits. `targets`: the seconds that predictions should not exceed."""

    def __init__(
        self, objectives: Objectives, facts: ModelFacts, graph_sizes: Sequence[int], window_seconds: float
    ) -> None:
        """window_seconds: how long a batch waits to fill, in modes that close batches."""
        self._declared = Limits.declared(facts)
        self._window_seconds = window_seconds
        self.sizes = list_sizes(facts.max_num_seqs, graph_sizes)
        prompt_tokens = declared = self._declared.prompt_tokens
        if objectives.latency is None:  # in one-step tasks, the rows determine the tokens
            prompt_tokens = min(declared, max(_SMALLEST_CHUNK, int(declared * _TOKENS_FLOOR)))
        self.floor = Limits(self.sizes[0], prompt_tokens)  # the lowest limits

    def choose(self, cost: Coefficients, traffic: Traffic, targets: Objectives) -> Limits | None:
        """Return the limits with the most rows that meet the targets, and with as many prompt tokens as then fit.

        Returns None if no limits meet the targets. The time to the first token does not reduce the rows, because with
        fewer rows requests would only wait longer. So limits that miss only this target are returned too.
        """
        for num_rows in reversed(self.sizes):
            if targets.latency is not None:
                holds = self._predict_latency(num_rows, cost, traffic) <= targets.latency
                prompt_tokens = self._declared.prompt_tokens if holds else None
            else:
                prompt_tokens = self._choose_tokens(num_rows, cost, traffic, targets)
            if prompt_tokens is not None:
                return Limits(num_rows, prompt_tokens)
        return None

    def exceeds(self, limits: Limits, cost: Coefficients, traffic: Traffic, targets: Objectives) -> bool:
        """Return whether steps at these limits exceed a target by more than a twentieth."""
        if targets.latency is not None:
            return self._predict_latency(limits.num_rows, cost, traffic) > _BAND * targets.latency
        step = cost.seconds(limits.num_rows, limits.prompt_tokens)
        return targets.inter_token_latency is not None and step > _BAND * targets.inter_token_latency

    def clip_rows(self, wanted: int, now: int) -> int:
        """Return the size nearest to `wanted`, among the neighbours of `now` and the sizes from half to twice `now`."""
        index = self.sizes.index(now)
        near = {size for size in self.sizes if now / 2 <= size <= now * 2} | {
            *self.sizes[max(0, index - 1) : index + 2]
        }
        return min(near, key=lambda size: abs(size - wanted))

    def _predict_latency(self, num_rows: int, cost: Coefficients, traffic: Traffic) -> float:
        return self._window_seconds + 2 * cost.seconds(num_rows, num_rows * traffic.tokens_per_row)

    def _choose_tokens(self, num_rows: int, cost: Coefficients, traffic: Traffic, targets: Objectives) -> int | None:
        """Return the most prompt tokens with which a step meets the target for the time between tokens.

        Returns None if the traffic needs more prompt tokens than this number. If the predicted time to the first token
        misses its target, the number is halved until the time meets the target. If this would leave too few prompt
        tokens for the traffic, the number is not reduced.
        """
        floor, room = self.floor, self._declared.prompt_tokens
        need = min(room, max(floor.prompt_tokens, num_rows * traffic.prompt_tokens_per_decode))
        if num_rows == floor.num_rows:
            need = floor.prompt_tokens  # fewer rows are not possible, so fewer prompt tokens than needed are accepted
        if targets.inter_token_latency is not None:
            room = min(room, _find_room(num_rows, cost, targets.inter_token_latency))
        if room < need:
            return None
        if targets.time_to_first_token is not None:
            rows, tokens = min(num_rows, traffic.num_rows), room
            while tokens >= max(floor.prompt_tokens, _HEADROOM * traffic.prompt_tokens):
                if _count_steps(traffic, tokens) * cost.seconds(rows, tokens) <= targets.time_to_first_token:
                    return tokens
                tokens //= 2
        return room


def _find_room(num_rows: int, cost: Coefficients, seconds: float) -> int:
    """Return the most prompt tokens with which a step with these rows takes at most `seconds`."""
    left = seconds - cost.seconds(num_rows, 0)
    if cost.per_token <= 0:
        return sys.maxsize if left >= 0 else 0
    return max(0, int(left / cost.per_token))


def _count_steps(traffic: Traffic, prompt_tokens: int) -> int:
    """Return the steps until a long prompt is computed, including the step that runs when it arrives."""
    return 1 + -(-traffic.long_prompt_tokens // prompt_tokens)
