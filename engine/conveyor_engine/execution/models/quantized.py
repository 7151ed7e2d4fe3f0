"""Rejects quantized checkpoints, declared or not, before and after transformers loads them.

transformers converts any stored number to the model's type, and leaves out tensors that the model's class lacks. So a
weight that means nothing without its scale is loaded without an error, and every answer is wrong. A checkpoint is
rejected if a file declares quantization, if its weights are not stored as floating-point numbers of 16 bits or more, or
if a tensor was left out that a module of the model needs. Called by `loader` and the pipelines of pictures.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import nn

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import MODEL_CARD, QUANTIZATION_FILES, read_object

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})  # names of number types in safetensors
_DECLARING_KEYS: Final = ("quantization_config", "compression_config", "quantization")  # in config.json
_WEIGHTS: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_NARROW = re.compile("F[48].*|F6.*")
# The last part of the names that quantizers give to weights, and to what weights are computed from.
_QUANTIZED = re.compile(
    r"q?weight|weight_(?:packed|shape|format)|qzeros|g_idx|SCB|absmax|quant_map|nested_(?:absmax|quant_map)"
    r"|(?:\w+_)?(?:zero_point|blocks|zeros)|(?:(?:weight|input|output|activation|act|[qkv]|\w+_proj)_)?scales?(?:_inv|_2)?"
    r"|codebooks|codes|trellis|bitsandbytes__\w+"
)
_CARD_CHARACTERS: Final = 16_384  # the front matter is at the beginning
_REPOSITORY = r"[\w.-]{1,96}/[\w.-]{1,96}"
_BASE = re.compile(rf"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?({_REPOSITORY})[\"']?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with config.json and weights."""

    directory: Path
    weights: str | None = None  # the file with the weights, if config.json names one
    vllm_serves: bool = False  # whether `runtime: VLLM` has the task

    def check_stored(self) -> None:
        """Reject a checkpoint that is quantized by its files or by the headers of its weights. Raises ModelError."""
        if (found := _find_declared(self.directory)) is not None:
            raise self._refuse(found)
        for name, kind in _read_kinds(self.directory, self.weights):
            if _NARROW.fullmatch(kind) or (kind not in FLOATS and _QUANTIZED.fullmatch(name.rpartition(".")[2])):
                raise self._refuse(f"{name} is stored as {kind}")

    def check_loaded(self, model: nn.Module, loading_info: Mapping[str, Any]) -> None:
        """Reject a checkpoint if a weight was converted from whole numbers, or if a module's tensor was left out.

        loading_info: from transformers or diffusers. Tensors of modules that this model lacks, such as another head,
        may be left out. Raises ModelError.
        """
        floats = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        for name, kind in _read_kinds(self.directory, self.weights):
            if kind not in FLOATS and not floats.isdisjoint(_name_alike(name, model)):
                raise self._refuse(f"{name} is stored as {kind}")
        modules = {name for name, _ in model.named_modules()}
        for key in sorted(map(str, loading_info.get("unexpected_keys") or ())):
            module, _, last = key.rpartition(".")
            if last not in ("weight", "bias"):
                if _QUANTIZED.fullmatch(last):
                    raise self._refuse(f"the model's class has no {key}")
            elif module and not modules.isdisjoint(_name_alike(module, model)):
                raise ModelError(
                    f"the checkpoint in {self.directory} has {key}, which {type(model).__name__} leaves out, so its "
                    "answers would be wrong: use weights that fit config.json" + self._or_vllm()
                )

    def _refuse(self, found: str) -> ModelError:
        base = _find_base(self.directory)
        instead = f"{base}, which its README names as its base" if base else "the original, unquantized model"
        return ModelError(
            f"the checkpoint in {self.directory} is quantized ({found}), which this engine does not run: use {instead}"
            + self._or_vllm()
        )

    def _or_vllm(self) -> str:
        return ", or serve it with `runtime: VLLM`" if self.vllm_serves else ""


def _find_declared(directory: Path) -> str | None:
    """Return the format and the file that declares it; None if no file does."""
    for name in QUANTIZATION_FILES:
        if (directory / name).is_file():
            content = read_object(directory / name)
            inner = content.get("quantization")
            return f"{_name_format(inner if isinstance(inner, dict) else content)} in {name}"
    config = read_object(directory / "config.json")
    for holder in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _DECLARING_KEYS:
            if isinstance(holder.get(key), dict):
                return f"{_name_format(holder[key])} in config.json"
    return None


def _name_format(declared: Mapping[str, Any]) -> str:
    """Return the names that a declaration has for its format, such as `modelopt NVFP4` or `gptq 4 bits`."""
    named = [str(declared[key])[:40] for key in ("quant_method", "quant_algo", "format") if declared.get(key)]
    bits = declared.get("bits", declared.get("w_bit"))
    return " ".join([*named, *([f"{bits} bits"] if type(bits) is int else [])]) or "quantization"


def _read_kinds(directory: Path, weights: str | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the number type of each stored tensor. Files that cannot be read are left to the loader."""
    for path in _list_weights(directory, weights):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    yield name, str(file.get_slice(name).get_dtype())
        except (SafetensorError, OSError):
            continue


def _list_weights(directory: Path, weights: str | None) -> Iterable[Path]:
    """Return the files that transformers or diffusers load: a whole file, or else the files of an index."""
    for name in (weights,) if weights else _WEIGHTS:
        if (directory / name).is_file() and name.endswith(".safetensors"):
            return [directory / name]
        index = name if name.endswith(".json") else f"{name}.index.json"
        named = read_object(directory / index).get("weight_map")
        if isinstance(named, dict):
            return [directory / each for each in sorted({each for each in named.values() if isinstance(each, str)})]
    return []


def _name_alike(name: str, model: nn.Module) -> set[str]:
    """Return the names that a tensor or module of the checkpoint may have in the model, with another head or none."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {name, name.removeprefix(prefix), prefix + name}


def _find_base(directory: Path) -> str | None:
    """Return the repository that the front matter of the model card names as `base_model`."""
    try:
        with (directory / MODEL_CARD).open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(_CARD_CHARACTERS)
    except OSError:
        return None
    head, end, _ = beginning.removeprefix("---\n").partition("\n---")
    found = _BASE.search(head) if beginning.startswith("---\n") and end else None
    return found[1] if found else None
