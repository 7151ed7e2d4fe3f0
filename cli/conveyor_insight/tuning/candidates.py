"""Chooses the settings of `spec.batching` to try. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from conveyor_api.batching import DEFAULT_WINDOWS, Batching
from conveyor_api.quantities import parse_duration_seconds

MAX_CANDIDATES: Final = 32
_MOST_ROWS: Final = 1024
_FACTORS: Final = (0.5, 2, 4)
_NAMES: Final = {"max_batch_size": "maxBatchSize", "window": "window", "max_batch_tokens": "maxBatchTokens"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values of `spec.batching`; None: the field is not set."""

    max_batch_size: int
    window: str | None = None
    max_batch_tokens: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.fields().items())

    def fields(self) -> Mapping[str, Any]:
        """Return the candidate's fields with their names in the spec."""
        found = ((name, getattr(self, field)) for field, name in _NAMES.items())
        return {name: value for name, value in found if value is not None}

    @property
    def window_seconds(self) -> float | None:
        """The window in seconds; None for a mode without windows."""
        return None if self.window is None else parse_duration_seconds(self.window)

    def is_valid(self) -> bool:
        """Return whether a step has at least one token for each request, as the API requires."""
        return self.max_batch_tokens is None or self.max_batch_tokens >= self.max_batch_size


@dataclass(frozen=True, slots=True)
class Axis:
    """One field, and the values to try for it. The fields of earlier axes keep their best values."""

    field: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{_NAMES[self.field]} {', '.join(map(str, self.values))}"

    def vary(self, base: Candidate) -> list[Candidate]:
        """Return copies of the base, one for each other valid value of the field."""
        found = (replace(base, **{self.field: value}) for value in self.values)
        return [candidate for candidate in found if candidate != base and candidate.is_valid()]


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings to try. `current`: the service's current setting, which is measured first.

    implied_mode: the mode in effect, if the spec names no mode and the mode in effect has a window; otherwise None. If
    it is set, a patch that sets a window must also name the mode.
    """

    current: Candidate
    axes: tuple[Axis, ...]
    implied_mode: str | None = None

    @property
    def most_candidates(self) -> int:
        """The maximum number of candidates, including the current one."""
        return 1 + sum(len(axis.values) for axis in self.axes)

    def build_fields(self, candidate: Candidate) -> dict[str, Any]:
        """Return the fields of `spec.batching` that differ from the current candidate's."""
        old = self.current.fields()
        changed = {name: value for name, value in candidate.fields().items() if old.get(name) != value}
        if "window" in changed and self.implied_mode is not None:
            changed["mode"] = self.implied_mode
        return changed


def make_plan(
    given: Batching, task: str | None, sizes: Sequence[int], windows: Sequence[str], step_tokens: Sequence[int]
) -> Plan:
    """Return a plan that tries batch limits, then windows, then step budgets (`maxBatchTokens`).

    given: `spec.batching`. For an empty argument, the plan tries values around the current one. If neither the spec nor
    the caller sets a step budget, the plan tries none, and the engine chooses its own.

    Raises ValueError for mode None, for a setting that the mode does not have, and for too many candidates.
    """
    batching = given.settle(task)
    if batching.mode == "None":
        raise ValueError("mode None runs one request at a time: there is no limit to tune")
    if windows and batching.mode not in DEFAULT_WINDOWS:
        raise ValueError(f"mode {batching.mode} has no window")
    size, window, tokens = batching.effective_batch_size, batching.effective_window, batching.max_batch_tokens
    if tokens is not None and max(sizes, default=0) > tokens:
        raise ValueError(f"a batch of {max(sizes)} needs as many tokens a step, and maxBatchTokens is {tokens}")
    found = (
        Axis("max_batch_size", tuple(sizes or _around(size, _MOST_ROWS))),
        Axis("window", tuple(windows or ([] if window is None else _around_window(window)))),
        Axis("max_batch_tokens", tuple(step_tokens or ([] if tokens is None else _around(tokens, 16_777_216)))),
    )
    implied_mode = batching.mode if given.mode is None and window is not None else None
    planned = Plan(Candidate(size, window, tokens), tuple(axis for axis in found if axis.values), implied_mode)
    if planned.most_candidates > MAX_CANDIDATES:
        raise ValueError(f"{planned.most_candidates} settings are too many: at most {MAX_CANDIDATES}")
    return planned


def _around(value: int, most: int) -> list[int]:
    return sorted({min(most, max(1, round(value * factor))) for factor in _FACTORS} - {value})


def _around_window(window: str) -> list[str]:
    milliseconds = round(parse_duration_seconds(window) * 1000)
    return [f"{each}ms" for each in _around(milliseconds, 3_600_000)]
