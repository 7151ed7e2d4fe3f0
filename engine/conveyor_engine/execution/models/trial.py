"""Checks whether two modules compute the same: calls both on random input, in the way the model calls the first one.

Used by `recognise`, `fuse`, `latent`, `native_layers` and `last_layer`. A `Recorder` replaces attention, so that the
inputs of attention are compared as well. Attention could otherwise hide a difference before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution.attention.backend import AttentionSpec, LayerShape, same_spec
from conveyor_engine.execution.attention.interface import HARMLESS, Paged
from conveyor_engine.execution.models.probe import run_forward

# Largest relative error of a row. The number and order of roundings may differ. A different formula gives far more.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Pairs of scales: of hidden states, and of attention's output. Large numbers reveal clipping. In a layer, small hidden
# states reveal differences in what is added to the residual, and a small attention output reveals those in the MLP.
PART_SCALES = ((1.0, 1.0), (30.0, 30.0))
LAYER_SCALES = ((1.0, 1.0), (0.001, 1.0), (0.001, 0.001))
NUM_TOKENS = 8
_UNDERSTOOD = HARMLESS | {"hidden_states", "position_embeddings", "paged"}


@dataclass(frozen=True, slots=True)
class Attended:
    """One call of attention: the spec and the inputs, each (T, heads, dim)."""

    spec: AttentionSpec
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def shape(self) -> LayerShape:
        """Return the number and the size of the layer's heads."""
        return LayerShape(self.query.shape[1], self.key.shape[1], self.key.shape[2], self.value.shape[2])


@dataclass(slots=True)
class Recorder:
    """A `Paged` that records each call and returns the same random numbers each time."""

    scale: float
    calls: list[Attended] = field(default_factory=list)
    runs_bidirectional: ClassVar[bool] = True  # `probe` has already rejected layers that must be causal and are not

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(Attended(spec, query, key, value))
        return random(*query.shape[:2], value.shape[2], like=query) * self.scale


@dataclass(frozen=True, slots=True)
class Call:
    """The keyword arguments with which the model calls one of its layers or attentions.

    A replay uses the same arguments except for hidden states, which are random.
    """

    arguments: dict[str, Any]

    def attended(self, module: nn.Module) -> Attended | None:
        """Return the module's call of attention; None if it does not call attention exactly once."""
        _, calls = self._replay(module, *PART_SCALES[0])
        return calls[0] if len(calls) == 1 else None

    def same(self, original: nn.Module, ours: nn.Module, scales: Iterable[tuple[float, float]]) -> bool:
        """Return whether both modules return the same and call attention with the same inputs."""
        return all(_same_answer(*self._replay(original, *both), *self._replay(ours, *both)) for both in scales)

    def _replay(self, module: nn.Module, scale: float, attention_scale: float) -> tuple[object, list[Attended]]:
        recorder = Recorder(attention_scale)
        return self.run(module, scale, recorder), recorder.calls

    def run(self, module: nn.Module, scale: float, paged: Paged) -> object:
        """Call the module with random hidden states of this scale and this attention."""
        hidden_states = self.arguments["hidden_states"]
        hidden_states = random(*hidden_states.shape, like=hidden_states, seed=1) * scale
        return module(**(self.arguments | {"hidden_states": hidden_states, "paged": paged}))


Calls = Mapping[nn.Module, Call]


def observe_calls(model: PreTrainedModel) -> Calls:
    """Record how the model calls its layers and attentions, in one forward at positions across its whole context.

    Omits modules that receive an argument which our modules would ignore. The result does not keep the modules alive.
    """
    calls: WeakKeyDictionary[nn.Module, Call] = WeakKeyDictionary()

    def note(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = dict(zip(("hidden_states", "not understood"), positional, strict=False)) | named
        if all(value is None or name in _UNDERSTOOD for name, value in arguments.items()):
            calls[module] = Call(arguments)

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "self_attn") or hasattr(module, "o_proj")
    ]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048
    try:
        run_forward(model, torch.linspace(0, limit - 1, NUM_TOKENS, device=model.device).long(), Recorder(1.0))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def random(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers of this shape, the same in every call with the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def same(expected: object, actual: object) -> bool:
    """Return whether both are tensors that differ only by rounding, tuples of such tensors, or the same object."""
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return expected is actual
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    distance = (expected.float() - actual.float()).norm(dim=-1)
    return bool((distance <= _TOLERANCE[actual.dtype] * expected.float().norm(dim=-1)).all())


def same_calls(expected: Sequence[Attended], actual: Sequence[Attended]) -> bool:
    """Return whether both have the same calls of attention, and at least one."""
    return 0 < len(expected) == len(actual) and all(
        same_spec(one.spec, other.spec) and same((one.query, one.key, one.value), (other.query, other.key, other.value))
        for one, other in zip(expected, actual, strict=True)
    )


def _same_answer(expected: object, expected_calls: list[Attended], actual: object, calls: list[Attended]) -> bool:
    return len(expected_calls) == 1 and same_calls(expected_calls, calls) and same(expected, actual)
