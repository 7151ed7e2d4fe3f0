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
        rows,
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


@DTYPES
@EACH_STEP
@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), [(2, 4, 16, 48), (1, 1, 48, 16)])
def test_the_delta_rule_goes_on_from_its_rows_states(
    step: Step, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = random(step.num_tokens, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
    gates = random(step.num_tokens, heads, dtype=dtype), random(step.num_tokens, heads, dtype=dtype)
    decay, bias = -random(heads, dtype=torch.float32).exp(), random(heads, dtype=torch.float32)
    state = random(9, heads, key_dim, value_dim, dtype=torch.float32)
    rows = step.lay_out(len(state))
    right_qkv, right_state, a, b, right_decay, right_bias = widen(qkv, state, *gates, decay, bias)
    how = key_heads, 2.0
    right = expected.delta_rule(rows, right_qkv, (a, b), right_state, right_decay, right_bias, *how)
    out = kernels.delta_rule(to_device(rows), qkv, gates, state, decay, bias, *how)
    assert_same(out, right, dtype)
    assert_same(state, right_state, dtype)
    assert not out[step.num_tokens - step.padding :].any()


def test_the_delta_rule_of_equal_keys_stays_exact() -> None:
    """Without decay, the triangular matrix of a chunk is then the hardest to invert."""
    torch.manual_seed(0)
    qkv, gate = random(200, 64, dtype=torch.float32), torch.full((200, 1), 30.0, device=DEVICE)
    qkv[:, 16:32] = qkv[0, 16:32].clone()
    state, zero = torch.zeros((1, 1, 16, 32), device=DEVICE), torch.zeros(1, device=DEVICE)
    rows = Step(prompts=(200,)).lay_out(1)
    given = widen(qkv, gate, state, zero)
    right = expected.delta_rule(rows, given[0], (given[1], given[1]), given[2], given[3], given[3], 1, 1.0)
    out = kernels.delta_rule(to_device(rows), qkv, (gate, gate), state, zero, zero, 1, 1.0)
    assert_same(out, right, torch.float32)
    assert_same(state, given[2], torch.float32)


@DTYPES
@EACH_STEP
@pytest.mark.parametrize(("heads", "dim", "groups", "size"), [(4, 16, 2, 48), (1, 48, 1, 16)])
def test_mamba2_goes_on_from_its_rows_states(
    step: Step, heads: int, dim: int, groups: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    xbc = random(step.num_tokens, heads * dim + 2 * groups * size, dtype=dtype)
    wide = random(step.num_tokens, 16 + heads, dtype=dtype)
    of_heads = [random(heads, dtype=torch.float32) for _ in range(3)]
    of_heads[0] = -of_heads[0].sigmoid()  # large decays cost digits, because their sums over a chunk are subtracted
    state = random(9, heads, dim, size, dtype=torch.float32)
    rows, limits = step.lay_out(len(state)), (0.5, 1.5)
    right_xbc, right_wide, right_state, decay, direct, bias = widen(xbc, wide, state, *of_heads)
    right = expected.mamba2(rows, right_xbc, right_wide[:, 16:], right_state, (decay, direct, bias), groups, limits)
    out = kernels.mamba2(to_device(rows), xbc, wide[:, 16:], state, tuple(of_heads), groups, limits)
    assert_same(out, right, dtype)
    assert_same(state, right_state, dtype)
    assert not out[step.num_tokens - step.padding :].any()


@DTYPES
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(("groups", "size", "has_one_weight"), [(4, 16, True), (2, 48, False), (1, 2560, False)])
def test_a_gated_norm_is_that_of_cpus(
    groups: int, size: int, has_one_weight: bool, norm_first: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, wide = random(5, groups, size, dtype=dtype), random(5, groups * size + 16, dtype=dtype)
    weight = random(*((size,) if has_one_weight else (groups, size)), dtype=torch.float32)
    right_x, right_wide, right_weight = widen(x, wide, weight)
    right = expected.gated_norm(right_x, right_wide[:, 16:], right_weight, 1e-3, norm_first=norm_first)
    assert_same(kernels.gated_norm(x, wide[:, 16:], weight, 1e-3, norm_first=norm_first), right, dtype)
