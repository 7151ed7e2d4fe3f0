"""Token mixers with a state for each row whose recurrences the compiled kernels compute.

`fuse` replaces transformers' gated delta nets, Mamba-2 mixers and short convolutions by these modules, after a trial
on random input. A mixer computes all sequences of a step together and changes the states where they are. Its linear
layers keep the names of the checkpoint, which adapters use.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.interface import Paged, PagedStep, Probe
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.models.last_layer import lay_in_block
from conveyor_engine.execution.models.linear import build_linear
from conveyor_engine.execution.models.mixers import MixerForward, find_rows
from conveyor_engine.execution.models.trial import random, same
from conveyor_engine.execution.native import states as kernels
from conveyor_engine.execution.states import Shapes, StateKey, States

_WIDTH, _SIZE_MAX, _TAPS_MAX = 16, 512, 8  # what the kernels compute: multiples of 16, and at most so much


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
        self._shapes = shapes
        self._layer: int = mixer.layer_idx  # type: ignore[assignment]
        for name, part in mixer.named_children():
            if isinstance(part, nn.Linear):
                self.add_module(name, build_linear([part]))

    def forward(self, hidden_states: torch.Tensor, *_: Any, paged: Paged | None = None, **__: Any) -> torch.Tensor:
        x = hidden_states[0]
        if isinstance(paged, PagedStep):
            assert paged.states is not None
            rows, states = kernels.StateRows(paged.metadata.query_start_loc, *find_rows(paged)), paged.states
        else:  # a measurement: one text from its beginning
            starts = torch.tensor([0, len(x)], dtype=torch.int32)
            rows = kernels.StateRows(starts, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
            states = States.allocate(self._shapes, 1, x.device)
        return self._mix(x, rows, states)[None]

    @abstractmethod
    def _mix(self, x: torch.Tensor, rows: kernels.StateRows, states: States) -> torch.Tensor:
        """Return the result (T, H) for x (T, H)."""

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.get_submodule(name)(x)
        return projected

    def _convolve(
        self,
        x: torch.Tensor,
        rows: kernels.StateRows,
        states: States,
        taps: Taps,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        state = states.pools[StateKey(self._layer, "conv", 0)].transpose(1, 2)
        return kernels.conv(rows, x, state, taps.weight, taps.bias, silu=taps.silu, gates=gates)


class GatedDeltaNet(StateMixer):
    """The mixer of Qwen3.5, with a projection each for queries, keys and values, for z, for b and for a."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        self._taps = Taps.of(mixer.conv1d, silu=True)
        self._decay, self._dt_bias = -mixer.A_log.data.float().exp(), mixer.dt_bias.data.float()
        self._num_key_heads: int = mixer.num_k_heads
        self._norm = mixer.norm.weight.data.float(), mixer.norm.variance_epsilon

    def _mix(self, x: torch.Tensor, rows: kernels.StateRows, states: States) -> torch.Tensor:
        qkv = self._convolve(self._project("in_proj_qkv", x), rows, states, self._taps)
        gates = self._project("in_proj_a", x), self._project("in_proj_b", x)
        state = states.pools[StateKey(self._layer, "recurrent", 0)]
        out = kernels.delta_rule(rows, qkv, gates, state, self._decay, self._dt_bias, self._num_key_heads, 1.0)
        out = kernels.gated_norm(out, self._project("in_proj_z", x), *self._norm, norm_first=True)
        return self._project("out_proj", out.flatten(1))


class Mamba2(StateMixer):
    """The mixer of Bamba, Granite 4 and Nemotron-H."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        self._taps = Taps.of(mixer.conv1d, silu=True)
        vectors = -mixer.A_log.data.float().exp(), mixer.D.data.float(), mixer.dt_bias.data.float()
        self._vectors = vectors
        self._sizes: tuple[int, int, int] = mixer.intermediate_size, mixer.conv1d.out_channels, mixer.num_heads
        self._num_groups: int = mixer.n_groups
        self._limits: tuple[float, float] = mixer.time_step_limit
        size = getattr(mixer.norm, "group_size", mixer.intermediate_size)
        self._norm = mixer.norm.weight.data.float().view(-1, size), mixer.norm.variance_epsilon

    def _mix(self, x: torch.Tensor, rows: kernels.StateRows, states: States) -> torch.Tensor:
        gate, xbc, dt = self._project("in_proj", x).split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        xbc = self._convolve(xbc, rows, states, self._taps)
        state = states.pools[StateKey(self._layer, "recurrent", 0)]
        out = kernels.mamba2(rows, xbc, dt, state, self._vectors, self._num_groups, self._limits)
        out = kernels.gated_norm(out.view(len(x), *self._norm[0].shape), gate, *self._norm, norm_first=False)
        return self._project("out_proj", out.flatten(1))


class ShortConv(StateMixer):
    """The mixer of LFM2: a convolution between two gates."""

    def __init__(self, mixer: Any, shapes: Shapes) -> None:
        super().__init__(mixer, shapes)
        self._taps = Taps.of(mixer.conv, silu=False)

    def _mix(self, x: torch.Tensor, rows: kernels.StateRows, states: States) -> torch.Tensor:
        before, after, values = self._project("in_proj", x).chunk(3, dim=-1)
        return self._project("out_proj", self._convolve(values, rows, states, self._taps, (before, after)))


_KINDS: dict[type[StateMixer], set[str]] = {
    GatedDeltaNet: {"conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
    Mamba2: {"conv1d", "norm", "out_proj", "in_proj"},
    ShortConv: {"conv", "out_proj", "in_proj"},
}


def mixer_of(mixer: nn.Module) -> StateMixer | None:
    """Return our module for a mixer with states; None if it is not one that the compiled kernels compute."""
    if not isinstance(mixer.forward, MixerForward) or native.why_missing() is not None:
        return None
    weight = next(mixer.parameters())
    names = {name for name, _ in mixer.named_children()} - {"act"}
    kind = next((kind for kind, parts in _KINDS.items() if names == parts), None)
    if kind is None or weight.device.type != "cpu" or not native.supports(weight.dtype):
        return None
    # Half precision rounds at other places, so both are compared in float32.
    exact = mixer if weight.dtype == torch.float32 else copy.deepcopy(mixer).float()
    shapes = _find_shapes(exact)
    if not _fit_kernels(shapes) or not _compute_same(exact, kind(exact, shapes), shapes):
        return None
    return kind(mixer, _find_shapes(mixer))


def _find_shapes(mixer: nn.Module) -> Shapes:
    probe = Probe()
    mixer(_random_input(mixer)[:1, :2], paged=probe)
    return probe.states.shapes


def _random_input(mixer: nn.Module) -> torch.Tensor:
    weight = mixer.get_submodule("out_proj").weight
    assert isinstance(weight, torch.Tensor)
    return random(2, 12, weight.shape[0], like=weight)


def _fit_kernels(shapes: Shapes) -> bool:
    for key, state in shapes.items():
        if key.kind == "conv":
            channels, taps = state.shape
            if channels % _WIDTH or taps > _TAPS_MAX:
                return False
        elif state.dtype != torch.float32 or any(n % _WIDTH or n > _SIZE_MAX for n in state.shape[-2:]):
            return False
    return True


def _compute_same(mixer: nn.Module, ours: StateMixer, shapes: Shapes) -> bool:
    """Compare both over two sequences: in chunks, then in a chunk beside a decode, with their states carried."""
    hidden = _random_input(mixer)
    states = [States.allocate(shapes, 2, hidden.device) for _ in range(2)]
    done = [0, 0]
    for counts in ((5, 3), (1, 4), (3, 1)):
        x = torch.cat([hidden[row, begin : begin + n] for row, (begin, n) in enumerate(zip(done, counts, strict=True))])
        done = [begin + n for begin, n in zip(done, counts, strict=True)]
        rows = torch.tensor([1, 0]).repeat_interleave(torch.tensor(counts))  # the states are not in the step's order
        metadata = lay_in_block([0, counts[0], sum(counts)], done, torch.arange(len(x)))
        steps = [PagedStep(TorchPaged(), metadata, token_rows=rows, states=each) for each in states]
        if not same(mixer(x[None], paged=steps[0]), ours(x[None], paged=steps[1])):
            return False
    return True
