"""Token mixers with a state for each row whose recurrences the compiled kernels compute, or Triton's on CUDA.

`fuse` replaces transformers' gated delta nets, Mamba-2 mixers and short convolutions by these modules, after a trial
on random input. A mixer computes all sequences of a step together and changes the states where they are. Its linear
layers keep the names of the checkpoint, which adapters use. On CUDA, one product computes those of one input.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.attention.interface import Paged, PagedStep, Probe
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.last_layer import lay_in_block
from conveyor_engine.execution.models.linear import Plain, build_linear, build_plain, stackable
from conveyor_engine.execution.models.mixers import MixerForward, find_rows
from conveyor_engine.execution.models.trial import random, same
from conveyor_engine.execution.native import states as native_states
from conveyor_engine.execution.state_rows import StateRows
from conveyor_engine.execution.states import Shapes, StateKey, States

_WIDTH, _TAPS_MAX = 16, 8  # what the kernels compute: multiples of 16, and at most so many inputs of a convolution
_SIZES_MAX, _SIZES_MAX_TRITON = (512, 512), (128, 256)  # of the sides of a recurrent state
# Largest relative error of a row in 16 bits. Triton compiles other instructions for them than for float32.
_TOLERANCE_HALF = 0.1


class StateKernels(Protocol):
    """What the modules with kernels for states provide. `native.states` has the shapes."""

    def conv(
        self,
        rows: StateRows,
        x: torch.Tensor,
        state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor: ...

    def delta_rule(
        self,
        rows: StateRows,
        qkv: torch.Tensor,
        gates: tuple[torch.Tensor, torch.Tensor],
        state: torch.Tensor,
        decay: torch.Tensor,
        dt_bias: torch.Tensor,
        num_key_heads: int,
        beta_scale: float,
    ) -> torch.Tensor: ...

    def mamba2(
        self,
        rows: StateRows,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        state: torch.Tensor,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        num_groups: int,
        limits: tuple[float, float],
    ) -> torch.Tensor: ...

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, norm_first: bool
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Taps:
    """The weights of a convolution, for the kernel."""

    weight: torch.Tensor  # float32 (K, C)
    bias: torch.Tensor | None  # float32 (C,)
    silu: bool

    @classmethod
    def of(cls, conv: nn.Conv1d, *, silu: bool) -> "Taps":
        bias = None if conv.bias is None else conv.bias.data.float()
        return cls(conv.weight.data[:, 0].float().t().contiguous(), bias, silu)


class StateMixer(nn.Module, ABC):
    """A mixer over the packed tokens of a step: hidden states (1, T, H) -> (1, T, H)."""

    def __init__(self, mixer: nn.Module, shapes: Shapes) -> None:
        super().__init__()
        kernels_of_device = load_kernels(next(mixer.parameters()).device)
        assert kernels_of_device is not None
        self._shapes, self._kernels = shapes, kernels_of_device
        self._layer: int = mixer.layer_idx  # type: ignore[assignment]
        linears = {name: part for name, part in mixer.named_children() if isinstance(part, Plain)}
        self._output = output_of(mixer)
        self.add_module(self._output, build_linear([linears.pop(self._output)]))
        # The sizes of the outputs of the checkpoint's layers that our layers for inputs compute, by names.
        self.sizes_of_inputs: dict[str, dict[str, int]] = {}
        for names in _group(linears, joins=self._kernels is not native_states):
            name = names[0] if len(names) == 1 else f"{names[0]}_and_others"
            self.add_module(name, build_linear([linears[each] for each in names]))
            self.sizes_of_inputs[name] = {each: linears[each].out_features for each in names}

    def forward(self, hidden_states: torch.Tensor, *_: Any, paged: Paged | None = None, **__: Any) -> torch.Tensor:
        x = hidden_states[0]
        if isinstance(paged, PagedStep):
            assert paged.states is not None
            rows, states = find_rows(paged), paged.states
        else:  # a measurement: one text from its beginning
            rows, states = _make_text(len(x), x.device), States.allocate(self._shapes, 1, x.device)
        return self._mix(x, rows, states)[None]

    @abstractmethod
    def _mix(self, x: torch.Tensor, rows: StateRows, states: States) -> torch.Tensor:
        """Return the result (T, H) for x (T, H)."""

    def _project_inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the results (T, size) of the checkpoint's layers for x (T, H), by name."""
        results: dict[str, torch.Tensor] = {}
        for name, sizes in self.sizes_of_inputs.items():
            projected: torch.Tensor = self.get_submodule(name)(x)
            results |= zip(sizes, torch.split(projected, list(sizes.values()), dim=-1), strict=True)
        return results

    def _project_output(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.get_submodule(self._output)(x)
        return projected

    def _convolve(
        self,
        x: torch.Tensor,
        rows: StateRows,
        states: States,
        taps: Taps,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        state = states.pools[StateKey(self._layer, "conv", 0)].transpose(1, 2)
        return self._kernels.conv(rows, x, state, taps.weight, taps.bias, silu=taps.silu, gates=gates)


class GatedDeltaNet(StateMixer):
    """The mixer of Qwen3.5, with a projection each for queries, keys and values, for z, for b and for a."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        self._taps = Taps.of(mixer.conv1d, silu=True)
        self._decay, self._dt_bias = -mixer.A_log.data.float().exp(), mixer.dt_bias.data.float()
        self._num_key_heads: int = mixer.num_k_heads
        self._beta_scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0  # OLMo-hybrid's
        norm = mixer.o_norm if hasattr(mixer, "o_norm") else mixer.norm
        self._norm = norm.weight.data.float(), norm.variance_epsilon

    def _mix(self, x: torch.Tensor, rows: StateRows, states: States) -> torch.Tensor:
        qkv, z, a, b = self._find_inputs(x)
        qkv = self._convolve(qkv, rows, states, self._taps)
        state = states.pools[StateKey(self._layer, "recurrent", 0)]
        heads = self._decay, self._dt_bias, self._num_key_heads
        out = self._kernels.delta_rule(rows, qkv, (a, b), state, *heads, self._beta_scale)
        out = self._kernels.gated_norm(out, z, *self._norm, norm_first=True)
        return self._project_output(out.flatten(1))

    def _find_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values (T, C), then z (T, values), a and b (T, heads)."""
        inputs = self._project_inputs(x)
        return inputs["in_proj_qkv"], inputs["in_proj_z"], inputs["in_proj_a"], inputs["in_proj_b"]


class GroupedGatedDeltaNet(GatedDeltaNet):
    """The mixer of Qwen3-Next, whose two projections have the results of one key head after those of another."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        key, values = mixer.head_k_dim, mixer.value_dim // mixer.num_k_heads
        heads, device = mixer.num_v_heads // mixer.num_k_heads, mixer.dt_bias.device
        self._qkvz = _order(mixer.num_k_heads, (key, key, values, values)).to(device)
        self._ba = _order(mixer.num_k_heads, (heads, heads)).to(device)
        self._num_values: int = mixer.value_dim

    def _find_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = self._project_inputs(x)
        qkvz = inputs["in_proj_qkvz"].index_select(1, self._qkvz)
        b, a = inputs["in_proj_ba"].index_select(1, self._ba).chunk(2, dim=1)
        return qkvz[:, : -self._num_values], qkvz[:, -self._num_values :], a, b


class SplitGatedDeltaNet(GatedDeltaNet):
    """The mixer of OLMo-hybrid, with a projection each for queries, for keys and for values too."""

    def _find_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = self._project_inputs(x)
        qkv = torch.cat([inputs["q_proj"], inputs["k_proj"], inputs["v_proj"]], dim=1)
        return qkv, inputs["g_proj"], inputs["a_proj"], inputs["b_proj"]


def _order(num_groups: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the places of columns that are in groups of parts of these sizes, in an order of parts of groups."""
    groups = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([part.flatten() for part in torch.split(groups, list(sizes), dim=1)])


class Mamba2(StateMixer):
    """The mixer of Bamba, Granite 4 and Nemotron-H, and Falcon-H1's, which has factors and perhaps no norm."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        self._taps = Taps.of(mixer.conv1d, silu=True)
        vectors = -mixer.A_log.data.float().exp(), mixer.D.data.float(), mixer.dt_bias.data.float()
        self._vectors = vectors
        self._sizes: tuple[int, int, int] = mixer.intermediate_size, mixer.conv1d.out_channels, mixer.num_heads
        self._num_groups: int = mixer.n_groups
        self._limits: tuple[float, float] = mixer.time_step_limit
        self._factor: float = getattr(mixer, "ssm_in_multiplier", 1.0)  # of the input
        self._factors: torch.Tensor | None = getattr(mixer, "mup_vector", None)  # of the projection's results
        norm, size = mixer.norm, mixer.intermediate_size
        size = getattr(norm, "group_size", size // getattr(norm, "n_groups", 1))
        weight = None if isinstance(norm, nn.Identity) else norm.weight.data.float().view(-1, size)
        self._norm = None if weight is None else (weight, norm.variance_epsilon)
        self._norm_first: bool = getattr(norm, "norm_before_gate", False)

    def _mix(self, x: torch.Tensor, rows: StateRows, states: States) -> torch.Tensor:
        inputs = self._project_inputs(x if self._factor == 1.0 else x * self._factor)["in_proj"]
        if self._factors is not None:
            inputs = (inputs * self._factors.flatten()).to(x.dtype)
        gate, xbc, dt = inputs.split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        xbc = self._convolve(xbc, rows, states, self._taps)
        state = states.pools[StateKey(self._layer, "recurrent", 0)]
        out = self._kernels.mamba2(rows, xbc, dt, state, self._vectors, self._num_groups, self._limits)
        if self._norm is None:
            return self._project_output(out.flatten(1) * functional.silu(gate))
        out = out.view(len(x), *self._norm[0].shape)
        out = self._kernels.gated_norm(out, gate, *self._norm, norm_first=self._norm_first)
        return self._project_output(out.flatten(1))


class ShortConv(StateMixer):
    """The mixer of LFM2: a convolution between two gates."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        self._taps = Taps.of(mixer.conv, silu=False)

    def _mix(self, x: torch.Tensor, rows: StateRows, states: States) -> torch.Tensor:
        before, after, values = self._project_inputs(x)["in_proj"].chunk(3, dim=-1)
        return self._project_output(self._convolve(values, rows, states, self._taps, (before, after)))


_KINDS: dict[type[StateMixer], set[str]] = {
    GatedDeltaNet: {"conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
    GroupedGatedDeltaNet: {"conv1d", "norm", "out_proj", "in_proj_qkvz", "in_proj_ba"},
    SplitGatedDeltaNet: {*("conv1d", "o_norm", "o_proj", "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")},
    Mamba2: {"conv1d", "norm", "out_proj", "in_proj"},
    ShortConv: {"conv", "out_proj", "in_proj"},
}


def _group(linears: Mapping[str, Plain], *, joins: bool) -> list[list[str]]:
    """Divide layers of one input among products. joins: whether a product may compute several layers."""
    groups: list[list[str]] = []
    for name in linears:
        if joins and groups and stackable([linears[each] for each in (*groups[-1], name)]):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def load_kernels(device: torch.device) -> StateKernels | None:
    """Return the module with the kernels for states on this device; None if there is none."""
    if kernels.why_missing(device) is None:
        from conveyor_engine.execution.kernels import states  # needs triton

        return states
    return native_states if device.type == "cpu" and native.why_missing() is None else None


def mixer_of(mixer: nn.Module) -> StateMixer | None:
    """Return our module for a mixer with states; None if it is not one that our kernels compute."""
    if not isinstance(mixer.forward, MixerForward):
        return None
    weight = _convolution(mixer).weight
    names = {name for name, _ in mixer.named_children()} - {"act"}
    kind = next((kind for kind, parts in _KINDS.items() if names == parts), None)
    ours = load_kernels(weight.device)
    if kind is None or ours is None or (ours is native_states and not native.supports(weight.dtype)):
        return None
    exact = _widen(mixer)
    shapes = find_shapes(exact)
    if not _fit_kernels(shapes, ours) or not _compute_same(exact, kind(exact, shapes), shapes):
        return None
    shapes = find_shapes(mixer)
    replaced = kind(mixer, shapes)
    if exact is mixer or ours is native_states:
        return replaced
    return replaced if _compute_same(mixer, replaced, shapes, _same_in_half) else None


def _convolution(mixer: nn.Module) -> nn.Conv1d:
    return next(part for part in mixer.children() if isinstance(part, nn.Conv1d))


def output_of(mixer: nn.Module) -> str:
    """Return the name of the linear layer that computes the mixer's result."""
    return "o_proj" if hasattr(mixer, "o_proj") else "out_proj"


def _widen(mixer: nn.Module) -> nn.Module:
    """Return the mixer in float32. Half precision rounds at other places, so both are compared in float32."""
    if all(each.dtype == torch.float32 for each in mixer.parameters()):
        return mixer
    packed = [part for part in mixer.children() if isinstance(part, GpuLinear)]
    plain: dict[int, Any] = {id(part): build_plain(part.weight, part.bias) for part in packed}
    return copy.deepcopy(mixer, plain).float()


def _make_text(num_tokens: int, device: torch.device) -> StateRows:
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    return StateRows(starts, row, row == 0, 0, num_tokens, num_tokens)


def find_shapes(mixer: nn.Module) -> Shapes:
    """Return the shapes of the states that transformers' mixer keeps."""
    probe = Probe()
    mixer(_random_input(mixer, 2)[:1], paged=probe)
    return probe.states.shapes


def _random_input(mixer: nn.Module, num_tokens: int) -> torch.Tensor:
    """Return random hidden states of two texts (2, num_tokens, H)."""
    size = mixer.get_submodule(output_of(mixer)).out_features
    assert isinstance(size, int)
    return random(2, num_tokens, size, like=_convolution(mixer).weight)


def _fit_kernels(shapes: Shapes, ours: StateKernels) -> bool:
    most = _SIZES_MAX if ours is native_states else _SIZES_MAX_TRITON
    for key, state in shapes.items():
        if key.kind == "conv":
            channels, taps = state.shape
            if channels % _WIDTH or taps > _TAPS_MAX:
                return False
        elif state.dtype != torch.float32 or any(
            n % _WIDTH or n > limit for n, limit in zip(state.shape[-2:], most, strict=True)
        ):
            return False
    return True


def _same_in_half(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    error = (expected.float() - actual.float()).norm(dim=-1)
    return bool((error <= _TOLERANCE_HALF * expected.float().norm(dim=-1)).all())


def _compute_same(
    mixer: nn.Module,
    ours: StateMixer,
    shapes: Shapes,
    is_same: Callable[[torch.Tensor, torch.Tensor], bool] = same,
) -> bool:
    """Compare both over two sequences: in chunks, then in a chunk beside a decode, with their states carried."""
    longest = 5 if load_kernels(_convolution(mixer).weight.device) is native_states else 70
    hidden = _random_input(mixer, longest + 5)
    states = [States.allocate(shapes, 2, hidden.device) for _ in range(2)]
    done = [0, 0]
    for counts in ((longest, 3), (1, 4), (3, 1), (1, 1)):
        x = torch.cat([hidden[row, begin : begin + n] for row, (begin, n) in enumerate(zip(done, counts, strict=True))])
        done = [begin + n for begin, n in zip(done, counts, strict=True)]
        rows = torch.tensor([1, 0]).repeat_interleave(torch.tensor(counts))  # the states are not in the step's order
        metadata = lay_in_block([0, counts[0], sum(counts)], done, torch.arange(len(x), device=x.device))
        metadata.num_decodes = next((number for number, count in enumerate(counts) if count > 1), len(counts))
        steps = [PagedStep(TorchPaged(), metadata, token_rows=rows.to(x.device), states=each) for each in states]
        if not is_same(mixer(x[None], paged=steps[0]), ours(x[None], paged=steps[1])):
            return False
    return True
