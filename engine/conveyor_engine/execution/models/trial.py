"""Whether two modules compute the same: both are called as the model calls the first one, on random input.

Called by `recognise`. Attention itself is left out: a `Recorder` stands in for it, so that what goes into it can be
compared too, and a difference before it cannot be hidden behind it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution.attention.backend import AttentionSpec, LayerShape
from conveyor_engine.execution.attention.interface import HARMLESS
from conveyor_engine.execution.models.probe import run_forward

# Largest distance of a row from what it should be, next to its length. Roundings differ, in number and in order;
# formulas differ by far more.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Sizes of hidden states and of what attention gives. Large numbers show what a module clips. In a layer small hidden
# states let the branches stand out from the residual, and small attention lets the MLP stand out.
PART_SCALES = ((1.0, 1.0), (30.0, 30.0))
LAYER_SCALES = ((1.0, 1.0), (0.001, 1.0), (0.001, 0.001))
_NUM_TOKENS = 8
_UNDERSTOOD = HARMLESS | {"hidden_states", "position_embeddings", "paged"}


@dataclass(frozen=True, slots=True)
class Attended:
    """One call of attention: what it was asked, and its input (T, heads, dim)."""

    spec: AttentionSpec
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def shape(self) -> LayerShape:
        """The layer's geometry."""
        return LayerShape(self.query.shape[1], self.key.shape[1], self.key.shape[2], self.value.shape[2])


@dataclass(slots=True)
class Recorder:
    """`Paged` that notes each call and answers with numbers that depend on nothing."""

    scale: float
    calls: list[Attended] = field(default_factory=list)
    runs_bidirectional: ClassVar[bool] = True  # whether it may has been seen before

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(Attended(spec, query, key, value))
        return random(*query.shape[:2], value.shape[2], like=query) * self.scale


@dataclass(frozen=True, slots=True)
class Call:
    """How the model calls one of its layers or attentions: keyword arguments, of which the input is replaced."""

    arguments: dict[str, Any]

    def attended(self, module: nn.Module) -> Attended | None:
        """The one call of attention that the module makes."""
        _, calls = self._replay(module, *PART_SCALES[0])
        return calls[0] if len(calls) == 1 else None

    def same(self, original: nn.Module, ours: nn.Module, scales: Iterable[tuple[float, float]]) -> bool:
        """Whether both give the same, and ask the same of attention."""
        return all(_same_answer(*self._replay(original, *both), *self._replay(ours, *both)) for both in scales)

    def _replay(self, module: nn.Module, scale: float, attention_scale: float) -> tuple[object, list[Attended]]:
        recorder = Recorder(attention_scale)
        hidden_states = self.arguments["hidden_states"]
        hidden_states = random(*hidden_states.shape, like=hidden_states, seed=1) * scale
        return module(**(self.arguments | {"hidden_states": hidden_states, "paged": recorder})), recorder.calls


Calls = Mapping[nn.Module, Call]


def observe_calls(model: PreTrainedModel) -> Calls:
    """How the model calls its layers and attentions, seen in one forward at positions through its whole context.

    Left out is one that gets an argument which a module of ours would ignore.
    """
    calls: dict[nn.Module, Call] = {}

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
        run_forward(model, torch.linspace(0, limit - 1, _NUM_TOKENS, device=model.device).long(), Recorder(1.0))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def random(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The same numbers in every call, of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def same(expected: object, actual: object) -> bool:
    """Whether both are tensors that differ by roundings, or tuples of such, or the same otherwise."""
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return expected is actual
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    distance = (expected.float() - actual.float()).norm(dim=-1)
    return bool((distance <= _TOLERANCE[actual.dtype] * expected.float().norm(dim=-1)).all())


def _same_answer(expected: object, expected_calls: list[Attended], actual: object, calls: list[Attended]) -> bool:
    return (
        len(expected_calls) == len(calls) == 1
        and expected_calls[0].spec == calls[0].spec
        and all(same(getattr(expected_calls[0], name), getattr(calls[0], name)) for name in ("query", "key", "value"))
        and same(expected, actual)
    )
