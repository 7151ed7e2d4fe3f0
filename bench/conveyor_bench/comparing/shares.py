"""Measures each part's share of the time of the engine's steps, beside the machine's limit. For `engine --profile`.

The time of a part excludes the calls that it makes to other parts, so the shares add up to 1. The compiled
kernels time the parts of their layers themselves. `unexplained` is the rest of the forward: residual adds, reshapes and
transformers' Python code.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from conveyor_bench.comparing.slices import Phase
from conveyor_bench.comparing.systems import Conveyor, Prompts, Workload
from conveyor_engine.execution import native
from conveyor_engine.execution.models.layers import Attention, GatedMlp
from conveyor_engine.execution.models.packed_linear import PackedLinear

PARTS = (
    "linears",
    "attention",
    "norms",
    "rope",
    "activation",
    "kv_write",
    "sampling",
    "schedule",
    "host",
    "unexplained",
)
Shares = Mapping[str, float]


class Clock:
    """Measures the seconds of each part, without the seconds of other parts that it calls."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def time(self, part: str, owner: object, name: str) -> None:
        """From now on, add the time of calls to the owner's method `name` to this part."""
        call = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._charge()
            self._open.append(part)
            try:
                return call(*arguments, **keywords)
            finally:
                self._charge()
                self._open.pop()

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def _charge(self) -> None:
        """Add the time since the last call of this method to the innermost open part."""
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


def attach(conveyor: Conveyor) -> Clock:
    """Put timers around the engine's parts. They cannot be removed, so nothing else can be measured afterwards."""
    clock, runner, scheduler = Clock(), conveyor.runner, conveyor.core.scheduler
    for part, owner, names in (
        ("host", conveyor.core, ["step"]),
        ("schedule", scheduler, ["schedule", "update", "take_outputs"]),
        ("sampling", runner._sampler, ["set_row", "sample"]),
        ("unexplained", runner, ["_forward"]),
        ("attention", runner.backend, ["attend"]),
        ("kv_write", runner.backend, ["write_kv"]),
    ):
        for name in names:
            clock.time(part, owner, name)
    for module in runner.model.modules():
        for part, name in _parts_of(module):
            clock.time(part, module, name)
    return clock


def _parts_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (part, method) for a module, by its type or by transformers' name for it."""
    kind = type(module).__name__.lower()
    if isinstance(module, PackedLinear | nn.Linear):
        yield "linears", "forward"
    elif kind.endswith("norm"):
        yield "norms", "forward"
    elif "rotary" in kind:
        yield "rope", "forward"
    elif isinstance(module, Attention):
        yield "rope", "_rope"
    elif isinstance(module, GatedMlp):
        yield "activation", "_gated"


def measure_shares(conveyor: Conveyor, rounds: Sequence[Prompts], output_tokens: int) -> dict[Phase, list[Shares]]:
    """Return the seconds of each part, for each round's prefill and for each decode step.

    A round's prefill lasts until every request has its first token.
    """
    clock = attach(conveyor)
    _with_layers({})  # drops the times that the kernels measured before
    found: dict[Phase, list[Shares]] = {"prefill": [], "decode": []}
    for prompts in rounds:
        prefill, tokens = dict.fromkeys(PARTS, 0.0), 0
        for reached in conveyor.start(prompts, output_tokens):
            step = _with_layers(clock.take())
            if tokens:
                found["decode"].append(step)
            else:
                prefill = {part: prefill[part] + step[part] for part in PARTS}
            tokens = reached
        found["prefill"].append(prefill)
    return found


def measure_run(conveyor: Conveyor, run: Iterator[object]) -> Shares:
    """Return the seconds of each part in a whole run."""
    clock = attach(conveyor)
    _with_layers({})
    for _ in run:
        pass
    return _with_layers(clock.take())


def _with_layers(parts: Mapping[str, float]) -> Shares:
    """Add the times that the compiled kernels measured, and subtract them from `unexplained`, which includes them."""
    inside = {} if native.why_missing() else native.take_layer_seconds()
    moved = {"unexplained": -sum(inside.values())} | inside
    return {part: seconds + moved.get(part, 0.0) for part, seconds in parts.items()}


def summarise_shares(
    found: Mapping[Phase, Sequence[Shares]], limits: Mapping[Phase, float | None], workload: Workload
) -> dict[str, Any]:
    """Return the milliseconds of a prefill and of a decode step, the limit's milliseconds, and the parts' shares.

    The milliseconds and the shares are means over the faster half of the measurements. limits: the limit's seconds for
    each whole phase.
    """
    steps = {"prefill": 1, "decode": max(1, workload.output_tokens - 1)}
    return {
        phase: {"limit_milliseconds": round(1000 * (limits[phase] or 0) / steps[phase], 3), **_summarise(all_)}
        for phase, all_ in found.items()
        if all_
    }


def summarise_run(parts: Shares, limit_seconds: float) -> dict[str, Any]:
    """Return the same figures as `summarise_shares` for one whole run instead of a phase."""
    return {"limit_milliseconds": round(1000 * limit_seconds, 3), **_summarise([parts])}


def _summarise(all_: Sequence[Shares]) -> dict[str, Any]:
    quick = sorted(all_, key=lambda parts: sum(parts.values()))[: (len(all_) + 1) // 2]
    whole = sum(sum(parts.values()) for parts in quick)
    return {
        "milliseconds": round(1000 * whole / len(quick), 3),
        "shares": {part: round(sum(parts[part] for parts in quick) / whole, 3) for part in PARTS},
    }
