"""Reads what a checkpoint's files declare about its quantization.

Called by `execution.models.quantized`, which restores the weights, by `execution.models.preview` before weights are
downloaded, and by `termination`, for the service's status. Formats that cannot be restored are named here, as far as
their declaration shows it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import MODEL_CARD, QUANTIZATION_FILES, read_object
from conveyor_engine.plain_layers import is_plain, list_plain, list_targets

# The methods whose layouts `execution.models.quantized.layouts` has, and `gguf`, whose files `gguf_weights` reads.
RESTORED: Final = frozenset(
    {"fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "quark", "awq", "gptq", "mxfp4", "bitsandbytes", "gguf"}
)
_DECLARING_KEYS: Final = ("quantization_config", "compression_config", "quantization")  # in config.json
_METHODS: Final = {  # names of one method
    "auto_gptq": "gptq",
    "auto_awq": "awq",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}
_OF_AUTO_ROUND: Final = (  # its floats have the tensors of these methods
    (re.compile(r"fp8"), "fp8"),
    (re.compile(r"(mx|nv)_?fp"), "compressed-tensors"),
)
_GPTQ_FORMATS: Final = {"gptq": 1, "gptq_v2": 0}  # and what its zero points lack
_FP8_BITS, _FP4_BITS = 8, 4
_OF_MODELOPT: Final = {"NVFP4": _FP4_BITS, "W4A16_NVFP4": _FP4_BITS}
_OF_BLOCKS: Final = re.compile("FP8_(PB|BLOCK)")  # 128 rows and columns
_OF_QUARK: Final = {"fp8_e4m3": _FP8_BITS, "fp4": _FP4_BITS}
_GPTQ_BITS: Final = (2, 3, 4, 8)
_DENSE: Final = (None, "dense")
_BLOCKS: Final = re.compile(r"[1-9]\d{0,8}x[1-9]\d{0,8}")
_CARD_CHARACTERS: Final = 16_384  # the front matter is at the beginning
_REPOSITORY = r"[\w.-]{1,96}/[\w.-]{1,96}"
_BASE = re.compile(rf"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?({_REPOSITORY})[\"']?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Declared:
    """The quantization of a checkpoint.

    method: the format's name in transformers, such as `fp8`. name: its names in the declaration, such as `awq 4 bits`.
    file: where it is declared. problem: why this engine cannot restore it; empty if nothing in the declaration says so.
    zero_offset: what GPTQ's stored zero points lack. blocks: the rows and columns of a block, if scales are for blocks.
    kept_bits: of the numbers that the kernels for CPUs can keep; 0 if the declaration shows none, or several.
    kept_on_gpus: the same for GPUs. is_mixed: whether the numbers have different bits, of which `kept_on_gpus` are the
    most. is_ordered: whether a group's columns may lie anywhere (act-order). plain, targets: expressions for the layers
    that are not quantized, and for those that are; no targets: all others.
    """

    method: str
    name: str
    file: str
    problem: str = ""
    zero_offset: int = 0
    blocks: tuple[int | None, int | None] = (None, None)
    kept_bits: int = 0
    kept_on_gpus: int = 0
    is_mixed: bool = False
    is_ordered: bool = False
    plain: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def is_plain(self, path: str) -> bool:
        """Return whether a module has 16 bits. path: its name in transformers' class."""
        return is_plain(self.plain, self.targets, path)

    @property
    def where(self) -> str:
        """The format and the file that declares it, for messages."""
        return f"{self.name} in {self.file}"


def check_declared(directory: Path, declared: Declared, *, vllm_serves: bool) -> None:
    """Reject a checkpoint whose declaration shows that its weights cannot be restored. Raises ModelError."""
    if declared.problem or declared.method not in RESTORED:
        raise build_refusal(directory, declared.where, declared.problem, vllm_serves=vllm_serves)


def build_refusal(directory: Path, found: str, problem: str, *, vllm_serves: bool) -> ModelError:
    """Return the error for quantized weights that this engine does not read.

    found: what shows it. problem: the reason, if there is a special one. vllm_serves: whether `runtime: VLLM` has the
    task.
    """
    base = _find_base(directory)
    instead = f"{base}, which its README names as its base" if base else "the original, unquantized model"
    return ModelError(
        f"the checkpoint in {directory} is quantized ({found}) in a way that this engine does not read"
        + (f": {problem}" if problem else "")
        + f"; use {instead}"
        + or_vllm(vllm_serves)
    )


def or_vllm(serves: bool) -> str:
    """Return the end of an error's sentence, which names vLLM as a way out if it has the task."""
    return ", or serve it with `runtime: VLLM`" if serves else ""


def read_declared(directory: Path) -> Declared | None:
    """Return what the files declare; None if no file declares quantization. Raises ModelError."""
    found = _find_declared(directory)
    if found is None:
        return None
    settings, file = found
    method = _name_method(settings)
    problem = next(_find_problems(method, settings), "")
    checkpoint_format = str(settings.get("checkpoint_format", "gptq"))
    is_ordered, kept = _is_ordered(method, settings), _find_kept_bits(method, settings)
    on_gpus = {kept} if kept else _list_gpu_bits(method, settings)
    return Declared(
        method,
        _describe(settings),
        file,
        problem,
        zero_offset=_GPTQ_FORMATS.get(checkpoint_format, 0),
        blocks=_read_blocks(method, settings),
        kept_bits=0 if is_ordered else kept,
        kept_on_gpus=0 if 0 in on_gpus else max(on_gpus, default=0),
        is_mixed=len(on_gpus) > 1,
        is_ordered=is_ordered,
        plain=tuple(list_plain(settings)),
        targets=tuple(list_targets(_object(settings, "config_groups").values())),
    )


def _find_declared(directory: Path) -> tuple[Mapping[str, Any], str] | None:
    config = read_object(directory / "config.json")
    for holder in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _DECLARING_KEYS:
            if isinstance(holder.get(key), dict):
                return holder[key], "config.json"
    for name in QUANTIZATION_FILES:
        if (directory / name).is_file():
            content = read_object(directory / name)
            inner = content.get("quantization")
            return inner if isinstance(inner, dict) else content, name
    return None


def _name_method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method == "auto-round":
        method = str(settings.get("packing_format")).removeprefix("auto_round:")
        method = next((name for pattern, name in _OF_AUTO_ROUND if pattern.match(method)), method)
    if method is None:
        method = "modelopt" if "quant_algo" in settings else "gptq" if "desc_act" in settings else ""
    return _METHODS.get(str(method), str(method))


def _describe(settings: Mapping[str, Any]) -> str:
    """Return the names that a declaration has for its format, such as `modelopt NVFP4` or `gptq 4 bits`."""
    named = [str(settings[key])[:40] for key in ("quant_method", "quant_algo", "format") if settings.get(key)]
    bits = settings.get("bits", settings.get("w_bit"))
    return " ".join([*named, *([f"{bits} bits"] if type(bits) is int else [])]) or "quantization"


def _find_problems(method: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a declaration names that the stored tensors would not show."""
    if method == "awq" and str(settings.get("version", settings.get("format", "gemm"))).lower() != "gemm":
        yield "only the layout `gemm` of AWQ is read"
    if method == "gptq":
        if str(settings.get("checkpoint_format", "gptq")) not in _GPTQ_FORMATS:
            yield f"only the layouts {' and '.join(_GPTQ_FORMATS)} of GPTQ are read"
        if any(each.get("bits") not in _GPTQ_BITS for each in (settings, *_find_exceptions(settings))):
            yield f"only {', '.join(map(str, _GPTQ_BITS))} bits of GPTQ are read"
    if method == "compressed-tensors":
        sparsity = settings.get("sparsity_config") or {}
        if isinstance(sparsity, Mapping) and sparsity.get("format") not in _DENSE:
            yield "sparse weights are not read"
        if settings.get("transform_config"):
            yield "weights for transformed activations are not read"


def _find_exceptions(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return GPTQ's settings for modules that have bits of their own: GPTQModel's `dynamic`."""
    found = [_object(_object(settings, "dynamic"), name) for name in _object(settings, "dynamic")]
    return [each for each in found if "bits" in each]


def _read_blocks(method: str, settings: Mapping[str, Any]) -> tuple[int | None, int | None]:
    # transformers' default for `fp8`; null means no blocks.
    blocks = settings.get("weight_block_size", [128, 128] if method == "fp8" else None)
    if method == "compressed-tensors":
        structures = (each.get("block_structure") for each in _list_kinds(settings))
        blocks = next(filter(None, structures), None)
        if isinstance(blocks, str) and _BLOCKS.fullmatch(blocks):  # of older versions
            blocks = [int(size) for size in blocks.split("x")]
    if isinstance(blocks, list) and len(blocks) == 2 and all(type(each) is int and each > 0 for each in blocks):
        return blocks[0], blocks[1]
    has_blocks = method == "modelopt" and any(map(_OF_BLOCKS.match, _list_algorithms(settings)))
    return (128, 128) if has_blocks else (None, None)


def _find_kept_bits(method: str, settings: Mapping[str, Any]) -> int:
    """Return the bits of all numbers, if the kernels for CPUs know them in groups like these."""
    if method == "compressed-tensors":
        found = {_find_whole_bits(method, each) for each in _list_kinds(settings)}
    else:
        every = (settings, *({**settings, **each} for each in _find_exceptions(settings)))
        found = {_find_whole_bits(method, {**each, "type": "int", "num_bits": each.get("bits", 4)}) for each in every}
    return max(found) if len(found) == 1 else 0


def _find_whole_bits(method: str, kind: Mapping[str, Any]) -> int:
    """Return the bits of whole numbers, if `execution.models.quantized.grids` knows them in groups like these."""
    if method not in ("compressed-tensors", "awq", "gptq") or kind.get("type", "int") != "int":
        return 0
    bits, group = kind.get("num_bits"), kind.get("group_size")
    fits = group is None or (type(group) is int and (group < 0 or group % 32 == 0))
    is_byte = bits == 8 and method == "compressed-tensors" and kind.get("symmetric", True)
    return int(bits) if fits and (bits == 4 or is_byte) and bits is not None else 0


def _is_ordered(method: str, settings: Mapping[str, Any]) -> bool:
    return (method == "gptq" and bool(settings.get("desc_act"))) or any(
        each.get("actorder") == "group" for each in _list_kinds(settings)
    )


def _list_gpu_bits(method: str, settings: Mapping[str, Any]) -> set[int]:
    """Return the bits of all numbers that the kernels for GPUs know; 0 for others."""
    if method == "compressed-tensors":
        return {_find_whole_bits(method, each) or _find_float_bits(each) for each in _list_kinds(settings)}
    if method == "modelopt":
        return {
            _OF_MODELOPT.get(each, _FP8_BITS if each.startswith("FP8") else 0) for each in _list_algorithms(settings)
        }
    if method == "quark":
        layers = _object(settings, "layer_quant_config")
        every = (_object(settings, "global_quant_config"), *(_object(layers, name) for name in layers))
        return {_OF_QUARK.get(str(_object(each, "weight").get("dtype")), 0) for each in every}
    return {_FP4_BITS if method == "mxfp4" else _FP8_BITS if method in ("fp8", "fbgemm_fp8") else 0}


def _list_algorithms(settings: Mapping[str, Any]) -> set[str]:
    """Return the names that ModelOpt has for the formats of the layers."""
    layers = _object(settings, "quantized_layers")
    return {str(_object(layers, name).get("quant_algo")) for name in layers} or {str(settings.get("quant_algo"))}


def _find_float_bits(kind: Mapping[str, Any]) -> int:
    bits = kind.get("num_bits")
    return bits if kind.get("type") == "float" and bits in (_FP8_BITS, _FP4_BITS) else 0


def _list_kinds(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what compressed-tensors declares of the weights of each group of layers."""
    groups = _object(settings, "config_groups")
    return [_object(_object(groups, name), "weights") for name in groups]


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = settings.get(key)
    return value if isinstance(value, dict) else {}


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
