"""Rounds the linear layers of a model to 8 or 4 bits while `fuse` replaces its modules. Used by `start`.

`fuse` compares each module of our own with transformers' one while both have their weights in 16 bits. Then the weights
are rounded, one module at a time, so that memory holds few weights in 16 bits beside those that are rounded. Only
linear layers and experts that the compiled kernels compute are rounded: embeddings, norms and biases keep their type.
Embeddings that the checkpoint stores as whole numbers keep these.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig, Quantization
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.models.experts import Experts, is_gated
from conveyor_engine.execution.models.linear import LinearSpec, linear_kind
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.models.packed_linear import NativeLinear, PackedEmbedding, pack_stored
from conveyor_engine.execution.models.quantized.deferred import Deferred
from conveyor_engine.execution.models.quantized.rounding import find_group, quantize, quantize_stack
from conveyor_engine.execution.native.experts import PackedStack
from conveyor_engine.quantization import Declared

_BITS: Final[dict[Quantization, int]] = {"int8": 8, "int4": 4}
_HEAD_BITS: Final = 8  # errors of logits are not averaged by a later layer
_PLAIN_BITS: Final = 16
_MIN_SHARE: Final = 0.5  # of the weights; a model of which less gets smaller is rejected


class Quantizer:
    """Rounds modules as configured, and counts their linear layers. Called with each module of our own."""

    def __init__(self, model: PreTrainedModel, quantization: Quantization | None) -> None:
        """quantization: None rounds nothing."""
        self._model, self._quantization = model, quantization
        self._bits = quantization and _BITS[quantization]
        self.num_rounded = self.num_kept = self.num_bytes = 0
        head = model.get_output_embeddings()
        self._tied = None if head is None else head.weight
        self._rounded_weights = self._kept_weights = 0
        self._formats: set[str] = set()

    @property
    def summary(self) -> str:
        """Return what was done, for the log. kept: layers that no size of groups fits."""
        counts = f"linears={self.num_rounded} kept={self.num_kept} mib={self.num_bytes / 2**20:.0f}"
        share = find_share(self._model, self._rounded_weights, self._kept_weights)
        return f"{counts} share={share:.2f} formats={','.join(sorted(self._formats))}"

    def check_share(self) -> None:
        """Reject `quantization` for a model most of whose weights keep 16 bits. Raises ConfigError."""
        if self._quantization:
            share = find_share(self._model, self._rounded_weights, self._kept_weights)
            check_share(self._model, self._quantization, share)

    def __call__(self, module: nn.Module) -> None:
        head = self._model.get_output_embeddings()
        for part in module.modules():
            if isinstance(part, NativeLinear):
                self._round(part, _HEAD_BITS if self._bits and part is head else self._bits)
            elif isinstance(part, Experts):
                self._round_experts(part)
        for part in module.modules():
            if isinstance(part, NativeDecoderLayer):
                part.take_weights()

    def pack_embeddings(self) -> None:
        """Keep embeddings as the checkpoint stores them. Call this when all modules are replaced."""
        for path, part in list(self._model.named_modules()):
            if isinstance(part, nn.Embedding) and isinstance(part.weight, Deferred):
                head = self._model.get_output_embeddings() if part.weight is self._tied else None
                packed = head.packed if isinstance(head, NativeLinear) else None
                if head is None:
                    packed = pack_stored(part.weight)
                if isinstance(packed, native.PackedIntegers):
                    self.num_bytes += packed.data.nbytes if head is None else 0
                    self._model.set_submodule(path, PackedEmbedding(packed, part.weight.dtype))
        self._tied = None

    def _round(self, linear: NativeLinear, bits: int | None) -> None:
        if bits is not None:
            linear.packed = quantize(linear.packed, bits) or linear.packed
        self._count(linear.packed.data, linear.packed, 1)

    def _round_experts(self, experts: Experts) -> None:
        packed = experts.packed
        packed.gate_up = self._round_stack(packed.gate_up)
        packed.down = self._round_stack(packed.down)

    def _round_stack(self, stack: PackedStack) -> PackedStack:
        rounded = None if self._bits is None else quantize_stack(stack, self._bits)
        stack = rounded or stack
        self._count(stack.data, stack.first, len(stack))
        return stack

    def _count(self, data: torch.Tensor, packed: native.Packed, number: int) -> None:
        """Count matrices like `packed`, all of which are in `data`."""
        weights = number * packed.in_features * packed.out_features
        if isinstance(packed, native.PackedIntegers):
            self.num_rounded += number
            self._formats.add(f"int{packed.bits}/{packed.group}")
            self._rounded_weights += weights
        else:
            self.num_kept += number
            self._kept_weights += weights
        self.num_bytes += data.nbytes


def choose_bits(quantization: Quantization, *, is_head: bool) -> int:
    """Return how many bits a layer's numbers have."""
    return _HEAD_BITS if is_head else _BITS[quantization]


def find_share(model: nn.Module, rounded: int, kept: int = 0) -> float:
    """Return how many of the weights are rounded, from 0 to 1. Embeddings, norms and biases do not count.

    rounded, kept: the numbers of weights that are no parameters any more.
    """
    others = (part for part in model.modules() if not isinstance(part, nn.Embedding))
    plain = (parameter for part in others for parameter in part.parameters(recurse=False))
    kept += sum(each.numel() for each in plain if each.dim() > 1)
    return rounded / max(1, rounded + kept)


def check_share(model: nn.Module, quantization: Quantization, share: float) -> None:
    """Reject `quantization` for a model most of whose weights keep 16 bits. Raises ConfigError."""
    if share < _MIN_SHARE:
        raise ConfigError(
            f"`quantization: {quantization}` is set, but only {100 * share:.0f} % of the weights of "
            f"{type(model).__name__} are in layers that this engine can round; remove it"
        )


def packs_on_gpu(config: EngineConfig, device: torch.device) -> bool:
    """Return whether weights of 8 or 4 bits stay so on this device, which is no CPU."""
    return kernels.why_missing(device) is None and config.attention_backend != "torch"


def check_quantization(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, declared: Declared | None
) -> None:
    """Reject `quantization` for weights or devices without kernels. Raises ConfigError."""
    if config.quantization is None:
        return
    setting = f"`quantization: {config.quantization}`"
    if declared is not None:
        raise ConfigError(
            f"{setting} is set, but the model's weights are quantized already ({declared.name}); remove it"
        )
    if packs_on_gpu(config, device):
        return
    if device.type != "cpu":
        raise ConfigError(f"{setting} needs Triton, and `attention_backend: auto`; remove it")
    if config.attention_backend == "torch" or linear_kind(LinearSpec(device.type, dtype)) != "native":
        raise ConfigError(
            f"{setting} needs the compiled kernels and a CPU with AVX2, and `attention_backend: auto`; remove it"
        )


def is_computed(part: nn.Module) -> bool:
    """Return whether the kernels compute a module."""
    return isinstance(part, nn.Linear) or is_gated(part)


def count_bytes(
    model: PreTrainedModel,
    bits: int,
    head_bits: int = _HEAD_BITS,
    has_bits: Callable[[nn.Module], bool] = is_computed,
) -> int | None:
    """Return the bytes of a model's weights if modules of this kind have so many bits.

    Returns None if most weights are in other layers, as `check_share` does. The model may be on `meta`.
    """
    embeddings = {part.weight for part in model.modules() if isinstance(part, nn.Embedding)}
    head, sizes = model.get_output_embeddings(), dict[nn.Parameter, float]()
    for weight, part in _find_matrices(model, has_bits).items():
        wanted = head_bits if part is head else bits
        group = find_group(weight.shape[-1], wanted) if wanted < _PLAIN_BITS else None
        sizes[weight] = wanted + _PLAIN_BITS / group if group else _PLAIN_BITS  # a scale in 16 bits
    others = {*model.parameters()} - (sizes.keys() - embeddings)  # a tied head is stored beside the embeddings
    num_rounded = sum(each.numel() for each, size in sizes.items() if size < _PLAIN_BITS)
    num_weights = sum(each.numel() for each in {*sizes, *(others - embeddings)} if each.dim() > 1)
    if num_rounded < _MIN_SHARE * num_weights:
        return None
    num_bits = sum(each.numel() * size for each, size in sizes.items()) + sum(map(torch.numel, others)) * _PLAIN_BITS
    return round(num_bits / 8)


def _find_matrices(model: nn.Module, has_bits: Callable[[nn.Module], bool]) -> dict[nn.Parameter, nn.Module]:
    """Return the weights of these modules, with their modules. Biases of experts have two dimensions."""
    found = [(part, list(part.parameters())) for part in model.modules() if has_bits(part)]
    return {each: part for part, own in found for each in own if each.dim() == max(other.dim() for other in own)}
