"""Builds a model without weights, as the engine's start would, and describes it. Called by `__main__`.

A model on torch's device `meta` has shapes and no numbers. So the start's checks of the configuration and of the
layers run, and its checks of results do not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError, StartError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.attention.backend import LayerShape, SlotCaches
from conveyor_engine.execution.attention.groups import group_layers
from conveyor_engine.execution.gpus import GPUS, count_requests
from conveyor_engine.execution.limits import DEFAULT_BATCHED_TOKENS, find_context
from conveyor_engine.execution.models import checks, kinds
from conveyor_engine.execution.models.experts import find_clamps, is_gated
from conveyor_engine.execution.models.heads import build_own_head, count_own_weights
from conveyor_engine.execution.models.kinds import ModelKind
from conveyor_engine.execution.models.latent import keep_latents
from conveyor_engine.execution.models.loader import choose_attention, load_config
from conveyor_engine.execution.models.mixers import carry_states
from conveyor_engine.execution.models.probe import probe_layers
from conveyor_engine.execution.models.quantize import count_bytes, is_computed
from conveyor_engine.execution.models.quantized.checkpoint import GGUF
from conveyor_engine.execution.models.towers import take_towers
from conveyor_engine.execution.states import row_bytes
from conveyor_engine.limited import run_limited
from conveyor_engine.model_files import PIPELINE_INDEX, read_architectures, read_pipeline_class
from conveyor_engine.model_numbers import check_numbers
from conveyor_engine.preview.files import find_small_files
from conveyor_engine.preview.gguf_size import count_gguf_bytes
from conveyor_engine.quantization import Declared, read_declared
from conveyor_engine.registry import find_task, load, load_about
from conveyor_engine.wire.kv_tables import KVTables
from conveyor_engine.wire.step import NUM_AHEAD
from conveyor_protocol.families import FAMILIES, MEANINGS, PIPELINES

_DTYPE: Final = torch.bfloat16
_REQUEST_TOKENS: Final = 4096
_HEAD_BITS: Final = 16  # of published weights
_META: Final = torch.device("meta")
_CPU_SECONDS: Final = 5.0  # for the expressions of a checkpoint; names alone take milliseconds


def describe(model: str) -> tuple[bool, list[str]]:
    """Return whether this engine runs the model, and lines of text. Raises ConfigError for an impossible address."""
    try:
        found = find_small_files(model)
        return True, list(_describe(found.directory, found.stored_bytes))
    except ConfigError:
        raise
    except StartError as error:
        return False, [f"refused  {error}"]


def _describe(directory: Path, stored_bytes: int) -> Iterator[str]:
    check_numbers(directory)
    task = find_task("auto", directory)
    about = load_about(task)
    if about.check is not None:
        about.check(directory)
    is_pipeline = (directory / PIPELINE_INDEX).is_file()
    classes = read_pipeline_class(directory) if is_pipeline else ", ".join(read_architectures(directory))
    classes = classes or directory.name
    kind = kinds.find_kind(task, directory)
    if kind is None or not kind.own_attention:
        yield f"runs     {classes}, task {task}; its memory is measured at the start"
        if is_pipeline:
            yield f"tested   {PIPELINES[classes]}"
            yield f"weights  {_gb(stored_bytes)} stored"
        return
    config = load_config(str(directory), kind)
    built = _build(config, kind)
    weight_bytes = built.num_parameters() * _DTYPE.itemsize
    yield f"runs     {classes}, task {task}, unless a check of the start fails, which needs the weights"
    if about.describes:
        yield f"makes    {load(task, 'describing')(directory)}"
    yield f"tested   {_describe_family(config, task)}"
    stored = f"; {_gb(stored_bytes)} stored" if stored_bytes else ""
    declared = read_declared(directory)
    restored = f", restored from {declared.name}" if declared is not None else ""
    yield f"weights  {_gb(weight_bytes)} in BFloat16{restored}{stored}; {built.num_parameters():,} parameters"
    yield from _describe_rounded(built, task, declared, directory)
    if (on_gpus := _count_on_gpus(built, declared, directory)) is not None:
        about_size = "about " if declared and declared.is_mixed else ""
        yield f"gpu      {about_size}{_gb(on_gpus)} of weights: {declared and declared.name} is kept"
        weight_bytes = on_gpus
    if task == "generate":
        yield from _describe_head(config)
        yield from _describe_cache(built, config, weight_bytes)
    else:
        yield f"fits     {', '.join(gpu.name for gpu in GPUS if count_requests(gpu, weight_bytes, 0, 1)) or 'no GPU'}"


def _count_on_gpus(model: PreTrainedModel, declared: Declared | None, directory: Path) -> int | None:
    """Return the bytes of published weights whose bits a GPU keeps; None if it keeps none."""
    has_experts = any(map(_are_experts, model.modules()))
    if declared is not None and declared.method == GGUF:
        return count_gguf_bytes(directory, keeps_experts=has_experts, on_gpu=True)
    if declared is None or not declared.kept_on_gpus or (declared.is_ordered and has_experts):
        return None
    if declared.method == "mxfp4":  # which only experts have
        return _count_kept(model, declared, declared.kept_on_gpus, _are_experts)
    return _count_kept(model, declared, declared.kept_on_gpus)


def _count_kept(
    model: PreTrainedModel, declared: Declared, bits: int, has_bits: Callable[[nn.Module], bool] = is_computed
) -> int | None:
    """Return the bytes of published weights. Layers that the files declare as not quantized have 16 bits.

    Raises ModelError if the files' expressions for their names take too long.
    """
    parts = {path: part for path, part in model.named_modules() if has_bits(part)}
    run_limited(f"the list of layers in {declared.file}", lambda: list(map(declared.is_plain, parts)), _CPU_SECONDS)
    plain = {part for path, part in parts.items() if declared.is_plain(path)}
    return count_bytes(model, bits, _HEAD_BITS, lambda part: has_bits(part) and part not in plain)


def _are_experts(part: nn.Module) -> bool:
    """Return whether the kernels for GPUs compute these experts."""
    return is_gated(part) or find_clamps(part) is not None


def _describe_rounded(model: PreTrainedModel, task: str, declared: Declared | None, directory: Path) -> Iterator[str]:
    """Yield what the weights take in fewer bits: on a CPU in those of the files, or as `quantization` rounds them."""
    if declared is not None:
        kept = None
        if declared.method == GGUF:
            kept = count_gguf_bytes(directory, keeps_experts=any(map(is_gated, model.modules())))
        elif declared.kept_bits:
            kept = _count_kept(model, declared, declared.kept_bits)
        if kept is not None:
            yield f"cpu      {_gb(kept)} of weights: {declared.name} is kept"
        return
    found = {bits: count_bytes(model, bits) for bits in (8, 4)} if task == "generate" else {}
    sizes = [f"{_gb(size)} with `quantization: INT{bits}`" for bits, size in found.items() if size is not None]
    if sizes:
        yield f"rounded  {', '.join(sizes)}"


def _describe_family(config: PretrainedConfig, task: str) -> str:
    """Return whether CI tests the family with this task, and what the engine's own code computes of its layers."""
    family = FAMILIES.get(config.model_type)
    if family is None or task.capitalize() not in family.tasks:
        return f"no: no test has a model of the family {config.model_type} with this task"
    replaced = f"; the engine's own code computes {MEANINGS[family.replaced]}" if family.replaced else ""
    return f"{family.name}{replaced if task == 'generate' else ''}"


def _build(config: PretrainedConfig, kind: ModelKind) -> PreTrainedModel:
    """Return the model without weights, and without the parts that the engine leaves out. Raises ModelError."""
    interface.register()
    found = kind.of(config) or kind
    options: dict[str, Any] = {}
    if found.classes[type(config)]._can_set_attn_implementation():
        options["attn_implementation"] = choose_attention(config)
    try:
        with _META:
            model: PreTrainedModel = found.auto_class.from_config(config, dtype=_DTYPE, **options).eval()
    except checks.TRANSFORMERS_ERRORS as error:
        raise ModelError(f"the model cannot be built: {checks.on_one_line(error)}") from error
    if kind is kinds.CAUSAL_LM:
        take_towers(model)
    model.config.pad_token_id = None  # GPT-2's class looks for padding among the probe's tokens, which are no numbers
    return model


def _describe_head(config: PretrainedConfig) -> Iterator[str]:
    """Yield what the head for multi-token prediction takes, if config.json declares one that the engine can compute."""
    try:
        with _META:
            head = build_own_head(config, _DTYPE)
        if head is None:
            return
        keep_latents(head)
        layers, _ = probe_layers(head, _META)
    except (ModelError, *checks.TRANSFORMERS_ERRORS):
        return  # the model runs without its head
    token = _token_bytes(layers) + config.get_text_config().hidden_size * _DTYPE.itemsize
    size = _gb(count_own_weights(head) * _DTYPE.itemsize)
    yield f"head     {size} more, and {token:,} bytes a token, with `speculation: MTP`, on CPUs"


def _describe_cache(model: PreTrainedModel, config: PretrainedConfig, weight_bytes: int) -> Iterator[str]:
    carry_states(model)
    keep_latents(model)
    layers, shapes = probe_layers(model, _META)
    context, block_size = find_context(config) or _REQUEST_TOKENS, EngineConfig(model="-").block_size
    placed, tables = group_layers(layers, context, block_size, (1 + NUM_AHEAD) * DEFAULT_BATCHED_TOKENS["cuda"])
    block_bytes, state_bytes = SlotCaches().block_bytes(placed, block_size, _DTYPE), row_bytes(shapes)
    length = min(_REQUEST_TOKENS, context)
    request = tables.count_kept(length, block_size) * block_bytes + state_bytes
    states = f", and {state_bytes / 2**20:.1f} MiB of states a request" if state_bytes else ""
    token = f"{_token_bytes(layers):,} bytes a token{_describe_window(layers, tables)}{states}"
    yield f"cache    {token}; {request / 2**20:,.0f} MiB for a request of {length} tokens"
    held = {gpu.name: count_requests(gpu, weight_bytes, block_bytes, length, state_bytes, tables) for gpu in GPUS}
    fits = "; ".join(f"{name}: {number}" for name, number in held.items() if number)
    yield f"fits     requests of {length} tokens at once on one GPU: {fits or 'no GPU of this list holds one'}"


def _describe_window(layers: list[LayerShape], tables: KVTables) -> str:
    """Return which of a token's bytes are freed behind a window; empty if none are."""
    if not tables.windowed:
        return ""
    windowed = _token_bytes([layer for layer in layers if layer.window])
    return f", {windowed:,} of them only for the last {tables.window:,} tokens"


def _token_bytes(layers: list[LayerShape]) -> int:
    return SlotCaches().block_bytes(layers, 1, _DTYPE)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
