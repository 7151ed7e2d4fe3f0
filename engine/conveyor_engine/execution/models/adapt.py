"""Adds the configured LoRA adapters to a loaded model. Called by `tasks.generate` after `start.fuse`.

Linear layers of our own may compute several layers of the checkpoint in one product. An adapter of such a layer becomes
an adapter of the slice with that layer's outputs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution.models.adapter_files import Adapter
from conveyor_engine.execution.models.adapters import AdaptedLinear, Adapters, NativeAdaptedLinear
from conveyor_engine.execution.models.layers import Attention, GatedMlp
from conveyor_engine.execution.models.mixers import MixerForward
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.models.packed_linear import NativeLinear, PackedLinear

_Slices = dict[str, slice]  # outputs of a linear layer, by the name of the checkpoint's layer that computes them


def open_adapters(sources: Sequence[tuple[str, str]]) -> list[Adapter]:
    """Open the adapters at (name, directory), and check everything but their numbers. Raises ModelError."""
    return [Adapter(name, Path(directory)) for name, directory in sources]


def add_adapters(
    model: PreTrainedModel, found: Sequence[Adapter], device: torch.device, dtype: torch.dtype
) -> Adapters:
    """Wrap the linear layers that an adapter changes. Raises ModelError for an adapter that does not fit the model."""
    is_native = any(isinstance(part, NativeLinear) for part in model.modules())
    adapters = Adapters([adapter.rank for adapter in found], device, is_native=is_native)
    places, changed = dict(_find_places(model)), {name for adapter in found for name in adapter.shapes}
    for adapter in found:
        _check_names(adapter, places)
    for path, slices in places.items():
        if of_place := {name: outputs for name, outputs in slices.items() if name in changed}:
            part = model.get_submodule(path)
            assert isinstance(part, nn.Linear | PackedLinear)
            like = (device, part.weight.dtype if isinstance(part, nn.Linear) else dtype)
            model.set_submodule(path, _adapt(part, adapters, found, of_place, like))
    for module in model.modules():
        if isinstance(module, NativeDecoderLayer):
            module.use_adapters(adapters)
        elif isinstance(module.forward, MixerForward):
            module.forward.adapters = adapters
    return adapters


def _find_places(model: nn.Module) -> Iterator[tuple[str, _Slices]]:
    """Yield the path and the slices of each linear layer that may have adapters: not the head, nor parts for images."""
    merged: set[str] = set()
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    left_out = {head} | _find_parts_for_images(model)
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            yield f"{path}.qkv_proj", _slice(path, _sizes_of(module), "qkv_proj")
            merged.add(f"{path}.qkv_proj")
        elif isinstance(module, GatedMlp):
            size = module.gate_up_proj.out_features // 2
            yield f"{path}.gate_up_proj", _slice(path, {"gate_proj": size, "up_proj": size}, "gate_up_proj")
            merged.add(f"{path}.gate_up_proj")
        elif isinstance(module, nn.Linear | PackedLinear) and module not in left_out and path not in merged:
            yield path, {path: slice(0, module.out_features)}


def _find_parts_for_images(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute images outside of the text decoder. They run before a step's rows are known."""
    if not (isinstance(model, PreTrainedModel) and hasattr(model.base_model, "get_image_features")):
        return set()
    return set(model.base_model.modules()) - set(model.get_decoder().modules())


def _sizes_of(attention: Attention) -> dict[str, int]:
    shape = attention.shape
    keys = shape.num_kv_heads * shape.head_dim
    return {
        "q_proj": shape.num_heads * shape.head_dim,
        "k_proj": keys,
        "v_proj": shape.num_kv_heads * shape.value_dim,
    }


def _slice(path: str, sizes: dict[str, int], whole: str) -> _Slices:
    """Return the slices of a merged layer: those of its parts, and one for a checkpoint that has the whole layer."""
    slices, start = _Slices(), 0
    for name, size in sizes.items():
        slices[f"{path}.{name}"] = slice(start, start + size)
        start += size
    return slices | {f"{path}.{whole}": slice(0, start)}


def _check_names(adapter: Adapter, places: dict[str, _Slices]) -> None:
    known = {name for slices in places.values() for name in slices}
    if unknown := sorted(adapter.shapes.keys() - known):
        raise adapter.refuse(
            f"it changes {unknown[0]}, which is not a linear layer of this model that can have an adapter"
        )


def _adapt(
    part: nn.Linear | PackedLinear,
    adapters: Adapters,
    found: Sequence[Adapter],
    changed: _Slices,
    like: tuple[torch.device, torch.dtype],
) -> AdaptedLinear:
    """Return the layer with the adapters' matrices side by side, with zeros for adapters that do not change it."""
    device, dtype = like
    down = torch.zeros(len(changed), adapters.num_columns, part.in_features, device=device, dtype=dtype)
    slices = []
    for index, (name, outputs) in enumerate(changed.items()):
        up = torch.zeros(adapters.num_columns, outputs.stop - outputs.start, device=device, dtype=dtype)
        start = 0
        for adapter in found:
            if (shape := adapter.shapes.get(name)) is not None:
                _check_shape(adapter, name, (part.in_features, up.shape[1]))
                factors, columns = adapter.read(name, dtype), slice(start, start + shape.rank)
                down[index, columns], up[columns] = factors.down.to(device), factors.up.to(device)
            start += adapter.rank
        slices.append((outputs, up))
    kind = NativeAdaptedLinear if isinstance(part, NativeLinear) else AdaptedLinear
    return kind(part, adapters, down, slices)


def _check_shape(adapter: Adapter, layer: str, wanted: tuple[int, int]) -> None:
    shape = adapter.shapes[layer]
    if (shape.num_in, shape.num_out) != wanted:
        raise adapter.refuse(
            f"{layer} takes {wanted[0]} numbers and returns {wanted[1]} in this model, but {shape.num_in} and "
            f"{shape.num_out} in the adapter; it belongs to another base model"
        )
