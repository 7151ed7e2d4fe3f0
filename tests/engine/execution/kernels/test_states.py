"""Compares Triton's kernels for states with the compiled kernels for CPUs, over ragged steps."""

from dataclasses import dataclass, replace

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, DTYPES, ON_DEVICE, TOLERANCE, random

from conveyor_engine.execution import native
from conveyor_engine.execution.kernels import states as kernels
from conveyor_engine.execution.native import states as expected
from conveyor_engine.execution.state_rows import StateRows

pytestmark = [
    pytest.mark.skipif(native.why_missing() is not None, reason="needs the compiled kernels for CPUs"),
    *ON_DEVICE,
]


@dataclass(frozen=True)
class Step:
    """The tokens of each sequence, decodes first. Every second sequence is new. padding: tokens of no sequence."""

    decodes: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.decodes + self.prompts) + self.padding

    def lay_out(self, num_slots: int) -> StateRows:
        lengths = torch.tensor(self.decodes + self.prompts)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        slots = torch.randperm(num_slots)[: len(lengths)]
        # As in a graph, the host knows only how many tokens the prompts have at most.
        known = self.num_tokens if not self.padding else 0
        is_new = torch.arange(len(lengths)) % 2 == 0
        return StateRows(starts, slots, is_new, len(self.decodes), sum(self.prompts) + self.padding, known)


STEPS = {
    "decodes": Step(decodes=(1, 1, 1)),
    "prompts": Step(prompts=(1, 37, 16, 2, 64)),
    "both": Step(decodes=(1, 1), prompts=(33, 3, 1, 48)),
    "a graph": Step(decodes=(1, 0, 1, 0), prompts=(18, 2, 0, 0), padding=5),
}
EACH_STEP = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def to_device(rows: StateRows) -> StateRows:
    return replace(rows, **{name: getattr(rows, name).to(DEVICE) for name in ("query_start", "rows", "is_new")})


def without_empty(rows: StateRows) -> StateRows:
    """Return the sequences that have tokens. The kernels for CPUs also begin those that have none."""
    has_tokens = rows.query_start.diff() > 0
    starts = torch.cat([rows.query_start[:-1][has_tokens], rows.query_start[-1:]])
    return replace(rows, query_start=starts, rows=rows.rows[has_tokens], is_new=rows.is_new[has_tokens])


def widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.cpu().float().clone() for each in tensors]


def assert_same(actual: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == right.shape
    error = (actual.cpu().float() - right).abs().max() / right.abs().max()
    assert error < TOLERANCE[dtype], f"differ by {error:.1e}"


@DTYPES
@EACH_STEP
@pytest.mark.parametrize(("taps", "is_gated"), [(3, True), (4, False)])
def test_a_convolution_goes_on_from_its_rows_inputs(step: Step, taps: int, is_gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    channels = 48
    wide = random(step.num_tokens, 3 * channels, dtype=dtype)
    before, after, x = wide.chunk(3, dim=-1)
    state, weight = random(9, taps, channels, dtype=dtype), random(taps, channels, dtype=torch.float32)
    bias = None if is_gated else random(channels, dtype=torch.float32)
    rows = step.lay_out(len(state))
    wide_right, right_state = widen(wide, state)
    first, second, x_right = wide_right.chunk(3, dim=-1)
    right = expected.conv(
        without_empty(rows),
        x_right,
        right_state,
        weight.cpu(),
        None if bias is None else bias.cpu(),
        silu=not is_gated,
        gates=(first, second) if is_gated else None,
    )
    gates = (before, after) if is_gated else None
    out = kernels.conv(to_device(rows), x, state, weight, bias, silu=not is_gated, gates=gates)
    assert_same(out, right, dtype)
    assert_same(state, right_state, dtype)
    assert not out[step.num_tokens - step.padding :].any()
