"""Loads LoRA adapters into a model and unloads them, also between its steps. Used by `tasks.generate`.

Linear layers of our own may compute several layers of the checkpoint in one product. An adapter of such a layer becomes
an adapter of the slice with that layer's outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine import cgroup
from conveyor_engine.execution import native
from conveyor_engine.execution.models.adapter_files import Adapter
from conveyor_engine.execution.models.adapters import AdaptedLinear, Adapters, NativeAdaptedLinear
from conveyor_engine.execution.models.layers import Attention, GatedMlp
from conveyor_engine.execution.models.mixers import MixerForward
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.models.packed_linear import NativeLinear, PackedLinear
from conveyor_engine.execution.models.state_mixers import StateMixer
from conveyor_protocol.failure_reasons import FailureReason

_Like = tuple[torch.device, torch.dtype]
_Slices = dict[str, slice]  # outputs of a linear layer, by the name of the checkpoint's layer that computes them


@dataclass(slots=True)
class _Place:
    """A linear layer that may have adapters."""

    parent: nn.Module
    attribute: str
    slices: Mapping[str, slice]
    layer: NativeDecoderLayer | None  # that computes it in one call with others
    used: list[str] = field(default_factory=list)  # the slices that an adapter has changed so far
    num_columns: int = 0

    @property
    def linear(self) -> nn.Module:
        found: nn.Module = getattr(self.parent, self.attribute)
        return found

    @property
    def part(self) -> nn.Linear | PackedLinear:
        """Return the layer without adapters."""
        found = self.linear.part if isinstance(self.linear, AdaptedLinear) else self.linear
        assert isinstance(found, nn.Linear | PackedLinear)
        return found

    def count_bytes(self, used: list[str], num_columns: int, like: _Like) -> int:
        """Return the bytes of the matrices that `rebuild` makes, at most."""
        outputs = [self.slices[name].stop - self.slices[name].start for name in used]
        sizes = [*(self.part.in_features for _ in used), *outputs]
        # Padded, as the compiled kernels store them.
        padded: int = sum(-(-size // native.PANEL) for size in sizes) * native.PANEL
        return padded * num_columns * self.find_dtype(like[1]).itemsize

    def find_dtype(self, default: torch.dtype) -> torch.dtype:
        """Return the type of adapters' matrices. default: of layers with compressed weights."""
        return self.part.weight.dtype if isinstance(self.part, nn.Linear) else default

    def rebuild(self, used: list[str], num_columns: int, adapters: Adapters, like: _Like) -> None:
        """Give the layer room for these slices and columns, and keep what has been loaded."""
        part, of_part = self.part, (like[0], self.find_dtype(like[1]))
        kind = NativeAdaptedLinear if isinstance(part, NativeLinear) else AdaptedLinear
        made = kind(part, adapters, [self.slices[name] for name in used], num_columns, of_part)
        if isinstance(self.linear, AdaptedLinear):
            made.take(self.linear)
        self.used, self.num_columns = used, num_columns
        setattr(self.parent, self.attribute, made)
        if self.layer is not None:
            self.layer.use_adapters(adapters)


class ModelAdapters:
    """The adapters that a model has now. Create it before `join_layers`, which moves the layers."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        is_native = any(isinstance(part, NativeLinear) for part in model.modules())
        self.of_step = Adapters(device, is_native=is_native)
        self.reserved_bytes = 0
        """Of the device's free memory, for steps."""
        self.on_moved: Callable[[], None] = lambda: None
        """Called when matrices have got other places in memory."""
        self._like = (device, dtype)
        layers = [module for module in model.modules() if isinstance(module, NativeDecoderLayer)]
        for layer in layers:
            layer.use_adapters(self.of_step)
        layer_of = {part: layer for layer in layers for part in layer.modules()}
        self._places = [_find_place(model, path, slices, layer_of) for path, slices in _find_places(model)]
        for module in model.modules():
            if isinstance(module.forward, MixerForward):
                module.forward.adapters = self.of_step

    @property
    def _reserved_host_bytes(self) -> int:
        return self.reserved_bytes if self._like[0].type == "cpu" else 0

    def count_free_bytes(self) -> int:
        """Return the host's free memory, without what steps need there."""
        return max(0, cgroup.free_memory_bytes() - self._reserved_host_bytes)

    def read(self, name: str, directory: str) -> Adapter:
        """Read an adapter into the host's memory. Raises ModelError, also if it does not fit the model."""
        return self.fit(Adapter(name, directory, self._reserved_host_bytes))

    def fit(self, adapter: Adapter) -> Adapter:
        """Convert an adapter to the types of the model's layers. Raises ModelError if it does not fit the model."""
        self._check(adapter)
        adapter.convert({layer: place.find_dtype(self._like[1]) for place in self._places for layer in place.slices})
        return adapter

    def load(self, number: int, adapter: Adapter) -> Iterator[None]:
        """Load an adapter that fits under this number, layer by layer. Steps may run before each of them.

        Raises ModelError if memory has no room. Nothing of the adapter is left then, or when the iterator is closed
        early.
        """
        columns = self.of_step.find_free(adapter.rank)
        self._make_room(adapter, max(self.of_step.num_columns, -(-columns.stop // native.PANEL) * native.PANEL))
        self.of_step.take(number, columns)
        try:
            for place in self._places:
                linear = place.linear
                if isinstance(linear, AdaptedLinear):
                    yield
                    linear.write(columns, [adapter.read(name) for name in place.used])
        except BaseException:
            self.of_step.release(number)
            raise

    def unload(self, number: int) -> None:
        """Free the columns of an adapter that no row of a later step uses."""
        self.of_step.release(number)

    def _make_room(self, adapter: Adapter, num_columns: int) -> None:
        """Give the layers that the adapter changes, and those of others, the slices and columns that they need.

        One layer's matrices are replaced at a time, so that the old and the new ones of all never take memory together.
        If the memory is full, some layers keep more columns than others.
        """
        due: list[tuple[_Place, list[str], int]] = []
        for place in self._places:
            added = [name for name in place.slices if name in adapter.shapes and name not in place.used]
            if added or (place.used and num_columns > place.num_columns):
                due.append((place, [*place.used, *added], max(num_columns, place.num_columns)))
        if not due:
            self.of_step.grow(num_columns)
            return
        old = [place.count_bytes(place.used, place.num_columns, self._like) for place, _, _ in due]
        new = [place.count_bytes(used, columns, self._like) for place, used, columns in due]
        self._check_memory(adapter, sum(new) - sum(old) + max(old))
        try:
            for place, used, columns in due:
                place.rebuild(used, columns, self.of_step, self._like)
            self.of_step.grow(num_columns)
        finally:
            self.on_moved()

    def _check_memory(self, adapter: Adapter, needed_bytes: int) -> None:
        """Raise ModelError if a CPU's memory has no room. The kernel would end the process; on a GPU, torch raises."""
        if self._like[0].type != "cpu":
            return
        free_bytes = self.count_free_bytes()
        if needed_bytes > free_bytes:
            raise adapter.refuse(
                f"to load it, the matrices of all adapters need {needed_bytes >> 20} MiB more, and "
                f"{free_bytes >> 20} MiB of memory are free; raise resources.limits.memory, or lower "
                "`adapter_slots`, `kv_memory_fraction` or `num_kv_blocks`",
                FailureReason.OUT_OF_MEMORY,
            )

    def _check(self, adapter: Adapter) -> None:
        known = {name: (place, outputs) for place in self._places for name, outputs in place.slices.items()}
        if unknown := sorted(adapter.shapes.keys() - known.keys()):
            raise adapter.refuse(
                f"it changes {unknown[0]}, which is not a linear layer of this model that can have an adapter"
            )
        for name in adapter.shapes:
            place, outputs = known[name]
            _check_shape(adapter, name, (place.part.in_features, outputs.stop - outputs.start))


def _find_place(
    model: nn.Module, path: str, slices: Mapping[str, slice], layer_of: Mapping[nn.Module, NativeDecoderLayer]
) -> _Place:
    path_of_parent, _, attribute = path.rpartition(".")
    parent = model.get_submodule(path_of_parent)
    return _Place(parent, attribute, slices, layer_of.get(parent))


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
        elif isinstance(module, StateMixer):
            for name, sizes in module.sizes_of_inputs.items():
                if len(sizes) > 1:
                    yield f"{path}.{name}", _slice(path, sizes, name)
                    merged.add(f"{path}.{name}")
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


def _check_shape(adapter: Adapter, layer: str, wanted: tuple[int, int]) -> None:
    shape = adapter.shapes[layer]
    if (shape.num_in, shape.num_out) != wanted:
        raise adapter.refuse(
            f"{layer} takes {wanted[0]} numbers and returns {wanted[1]} in this model, but {shape.num_in} and "
            f"{shape.num_out} in the adapter; it belongs to another base model"
        )
