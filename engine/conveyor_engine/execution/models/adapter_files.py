"""Reads LoRA adapters from directories in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Called by `adapt`. Only plain LoRA of linear layers is supported. An adapter with anything else (DoRA, trained biases,
embeddings or whole layers, a start that changes the base model's weights) is rejected, because it would load but give
other answers. Source of the method: LoRA (arXiv 2106.09685), rank-stabilised scale (arXiv 2312.03732).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from conveyor_engine.errors import ModelError
from conveyor_protocol.failure_reasons import FailureReason

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Starts that leave the base model's weights alone. PiSSA, OLoRA and others train against changed weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_PATTERN = re.compile(r"\^?[A-Za-z0-9_.]+")  # PEFT takes any regular expression here, which may run for ever
_WEIGHT = re.compile(r"(.+)\.lora_(A|B)\.weight")
RANK_MAX = 512


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to a linear layer's output for x (T, in): `x @ down.T @ up`."""

    down: torch.Tensor  # (rank, in)
    up: torch.Tensor  # (rank, out), multiplied by the adapter's scale

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, on the host in float32."""

    name: str
    factors: dict[str, Factors]  # by the name of the linear layer in the model

    @property
    def rank(self) -> int:
        """Return the largest rank of its factors."""
        return max(each.rank for each in self.factors.values())


class _Config(msgspec.Struct):
    """The fields of `adapter_config.json` that change what the adapter computes."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: bool | str | None = True
    bias: str = "none"
    lora_bias: Any = None
    use_dora: Any = None
    use_qalora: Any = None
    use_bdlora: Any = None
    kasa_config: Any = None
    arrow_config: Any = None
    fan_in_fan_out: Any = None
    modules_to_save: Any = None
    layer_replication: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None

    def find_unsupported(self) -> str | None:
        """Return the first field whose value this engine does not compute."""
        if self.peft_type.upper() != "LORA":
            return "peft_type"
        if self.init_lora_weights not in _PLAIN_STARTS:
            return "init_lora_weights"
        if self.bias != "none":
            return "bias"
        return next((name for name in _CHANGING if getattr(self, name)), None)

    def scale_of(self, layer: str, rank: int) -> float:
        """Return the factor for a layer, as PEFT does: a pattern of the end of the layer's name may have its own."""
        patterns = (alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, layer))
        alpha = next(patterns, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


_CHANGING = _Config.__struct_fields__[_Config.__struct_fields__.index("lora_bias") :]  # if any of them is set


def _matches(pattern: str, layer: str) -> bool:
    """Return whether the pattern is the layer's name or, without `^`, the last parts of it."""
    return layer == pattern.removeprefix("^") or layer.endswith(f".{pattern}")


def read_adapter(name: str, directory: Path) -> Adapter:
    """Read an adapter. Raises ModelError, which names the adapter."""
    try:
        config = _read_config(directory)
        return Adapter(name, _read_factors(directory, config))
    except ModelError as error:
        raise ModelError(f"the adapter {name!r} cannot be used: {error}", reason=error.reason) from error


def _read_config(directory: Path) -> _Config:
    path = directory / CONFIG_FILE
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError:
        message = f"{directory} has no {CONFIG_FILE}; save the adapter with PEFT's save_pretrained"
        raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND) from None
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE) from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not a LoRA configuration: {error}") from error
    for pattern in config.alpha_pattern:
        if not _PATTERN.fullmatch(pattern):
            raise ModelError(f"{path} has the pattern {pattern!r} in 'alpha_pattern', which is not the end of a name")
    if (field := config.find_unsupported()) is not None:
        raise ModelError(f"{path} has {field!r}, which this engine does not compute; it computes plain LoRA")
    return config


def _read_factors(directory: Path, config: _Config) -> dict[str, Factors]:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        message = f"{directory} has no {WEIGHTS_FILE}; save the adapter with safetensors"
        raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        message = f"{path} cannot be read: {error}"
        raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE) from error
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _WEIGHT.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            raise ModelError(f"{path} has the tensor {key!r}, which is no weight of plain LoRA")
        sides.setdefault(match[1], {})[match[2]] = tensor.float()
    if not sides:
        raise ModelError(f"{path} has no tensors")
    return {layer: _join(layer, found, config) for layer, found in sides.items()}


def _join(layer: str, sides: Mapping[str, torch.Tensor], config: _Config) -> Factors:
    """Check the two matrices of a layer, and multiply the second by the scale."""
    down, up = sides.get("A"), sides.get("B")
    if down is None or up is None:
        raise ModelError(f"{layer} has only one of its matrices lora_A and lora_B")
    if down.dim() != 2 or up.dim() != 2 or up.shape[1] != len(down) or not 1 <= len(down) <= RANK_MAX:
        shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
        raise ModelError(
            f"the matrices of {layer} have the shapes {shapes}, not (rank, in) and (out, rank) with a rank from 1 to "
            f"{RANK_MAX}"
        )
    scaled = up.t() * config.scale_of(layer, len(down))
    if not (down.isfinite().all() and scaled.isfinite().all()):
        raise ModelError(f"the matrices of {layer} have numbers that are not finite")
    return Factors(down, scaled.contiguous())


def find_total_rank(adapters: Sequence[Adapter]) -> int:
    """Return the sum of the adapters' ranks."""
    return sum(adapter.rank for adapter in adapters)
