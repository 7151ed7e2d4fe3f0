"""Reads LoRA adapters from directories in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Called by `adapt`. Only plain LoRA of linear layers is supported. An adapter with anything else (DoRA, trained biases,
embeddings or whole layers, a start that changes the base model's weights) is rejected, because it would load but give
other answers. Source of the method: LoRA (arXiv 2106.09685), rank-stabilised scale (arXiv 2312.03732).
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, deserialize

from conveyor_engine import cgroup
from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import read_object
from conveyor_protocol.failure_reasons import FailureReason

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Starts that leave the base model's weights alone. PiSSA, OLoRA and others train against changed weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_NAME = re.compile("[A-Za-z0-9_.]+")
_WEIGHT = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_(A|B)\.weight")
RANK_MAX = 512
_Tensors = dict[str, dict[str, Any]]  # by name: "dtype", "shape" and "data"
WEIGHTS_BYTES_MAX = 8 << 30  # rank 256 in all layers of a model of 70B parameters, with 16 bits
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to a linear layer's output for x (T, in): `x @ down.T @ up`."""

    down: torch.Tensor  # (rank, in)
    up: torch.Tensor  # (rank, out), multiplied by the adapter's scale


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The sizes of an adapter's matrices for one linear layer."""

    rank: int
    num_in: int
    num_out: int


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
    monteclora_config: Any = None
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


class Adapter:
    """One adapter, whose configuration and sizes have been checked. Its files are in memory.

    They are not mapped: a file that becomes shorter would end the process, and a slow volume would stop steps.
    """

    def __init__(self, name: str, directory: str, reserved_bytes: int = 0) -> None:
        """Read the files. Raises ModelError, which names the adapter.

        reserved_bytes: of the host's free memory, for other things.
        """
        self.name, folder = name, Path(directory)
        self.num_bytes = 0
        """Of the matrices, after `convert`."""
        with self._naming_the_adapter():
            self.signature = _sign(folder)
            self._config, self._tensors = _read_config(folder), _read_weights(folder, reserved_bytes)
            if _sign(folder) != self.signature:
                message = f"the files in {folder} were changed while they were read; put new files into a new folder"
                raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE)
            self.shapes = _read_shapes(self._tensors, folder / WEIGHTS_FILE)  # by the name of the layer in the model
        self._factors: dict[str, Factors] = {}

    @property
    def rank(self) -> int:
        """Return the largest rank of its layers."""
        return max(shape.rank for shape in self.shapes.values())

    def convert(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Convert the matrices to the types of the model's layers, in which `read` returns them. Raises ModelError."""
        with self._naming_the_adapter():
            self._factors = {layer: self._convert(layer, dtypes[layer]) for layer in self.shapes}
        self._tensors = {}
        self.num_bytes = sum(each.down.nbytes + each.up.nbytes for each in self._factors.values())

    def _convert(self, layer: str, dtype: torch.dtype) -> Factors:
        down, up = (_view(self._tensors[f"{_PREFIX}{layer}.lora_{side}.weight"]) for side in "AB")
        scale = self._config.scale_of(layer, len(down))
        factors = Factors(down.to(dtype, copy=True), (up.float().t() * scale).to(dtype).contiguous())
        if not (factors.down.isfinite().all() and factors.up.isfinite().all()):
            raise ModelError(f"the matrices of {layer} have numbers that are not finite in {dtype}")
        return factors

    def read(self, layer: str) -> Factors | None:
        """Return the matrices of a layer of the model, on the host; None if the adapter does not change it."""
        return self._factors.get(layer)

    @contextmanager
    def _naming_the_adapter(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            raise self.refuse(str(error), error.reason) from error

    def refuse(self, why: str, reason: FailureReason = FailureReason.UNSUPPORTED_MODEL) -> ModelError:
        """Return the error that names this adapter."""
        return ModelError(f"the adapter {self.name!r} cannot be used: {why}", reason=reason)


def _matches(pattern: str, layer: str) -> bool:
    """Return whether the pattern is the layer's name or, without `^`, the last parts of it. Raises ModelError.

    PEFT takes any regular expression, which may run for ever.
    """
    name = pattern.removeprefix(r".*\.")
    if not _NAME.fullmatch(name.removeprefix("^")):
        raise ModelError(f"'alpha_pattern' has the pattern {pattern!r}, which is not the end of a name")
    return layer == name.removeprefix("^") or layer.endswith(f".{name}")


def _find_file(directory: Path, name: str, saver: str) -> Path:
    """Return the file's path. Raises ModelError. saver: what writes such a file."""
    path = directory / name
    if not path.is_file():
        message = f"{directory} has no {name}; save the adapter with {saver}"
        raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND)
    return path


def _sign(directory: Path) -> tuple[tuple[int, int, int], ...]:
    """Return what changes when a file is replaced or written; () if a file is missing, which is found later."""
    try:
        found = [(directory / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError:
        return ()
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def _read_config(directory: Path) -> _Config:
    path = _find_file(directory, CONFIG_FILE, "PEFT's save_pretrained")
    try:
        config = msgspec.convert(read_object(path), _Config)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} is not a LoRA configuration: {error}") from error
    if (field := config.find_unsupported()) is not None:
        raise ModelError(f"{path} has {field!r}, which this engine does not compute; it computes plain LoRA")
    return config


def _read_weights(directory: Path, reserved_bytes: int) -> _Tensors:
    path = _find_file(directory, WEIGHTS_FILE, "safetensors")
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > WEIGHTS_BYTES_MAX:
                raise ModelError(f"{path} has {num_bytes} bytes, but at most {WEIGHTS_BYTES_MAX} are read")
            if 2 * num_bytes > cgroup.free_memory_bytes() - reserved_bytes:  # while `deserialize` copies
                message = f"{path} has {num_bytes} bytes, and twice as many are not free in memory"
                raise ModelError(message, reason=FailureReason.OUT_OF_MEMORY)
            return dict(deserialize(file.read(num_bytes)))  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        message = f"{path} cannot be read: {error}"
        raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE) from error


def _view(stored: dict[str, Any]) -> torch.Tensor:
    return torch.frombuffer(stored["data"], dtype=_FLOATS[stored["dtype"]]).view(stored["shape"])


def _read_shapes(tensors: _Tensors, path: Path) -> dict[str, AdapterShape]:
    """Return the sizes of all layers' matrices. Raises ModelError."""
    sides: dict[str, dict[str, list[int]]] = {}
    for key, stored in tensors.items():
        match = _WEIGHT.fullmatch(key)
        if match is None:
            raise ModelError(f"{path} has the tensor {key!r}, which is no weight of plain LoRA")
        if (kind := stored["dtype"]) not in _FLOATS:
            floats = ", ".join(sorted(_FLOATS))
            raise ModelError(f"{path} has {key} as {kind}: the adapter is quantized; use one with weights in {floats}")
        sides.setdefault(match[1], {})[match[2]] = stored["shape"]
    if not sides:
        raise ModelError(f"{path} has no tensors")
    return {layer: _find_shape(layer, found) for layer, found in sides.items()}


def _find_shape(layer: str, sides: Mapping[str, Sequence[int]]) -> AdapterShape:
    down, up = sides.get("A"), sides.get("B")
    if down is None or up is None:
        raise ModelError(f"{layer} has only one of its matrices lora_A and lora_B")
    if len(down) != 2 or len(up) != 2 or up[1] != down[0] or not 1 <= down[0] <= RANK_MAX:
        raise ModelError(
            f"the matrices of {layer} have the shapes {tuple(down)} and {tuple(up)}, not (rank, in) and (out, rank) "
            f"with a rank from 1 to {RANK_MAX}"
        )
    return AdapterShape(down[0], down[1], up[0])
