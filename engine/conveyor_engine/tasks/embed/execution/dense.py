"""Reads the Dense layers that sentence-transformers puts behind the pooling, such as EmbeddingGemma's two.

A ColBERT model has them in place of the pooling, for each token's vector. Called by `text_runner` and `heads`.
Layers that compute something else than a product and a known activation are rejected.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import read_object

DENSE_FOLDERS: Final = ("2_Dense", "3_Dense")
TOKEN_DENSE_FOLDERS: Final = ("1_Dense", *DENSE_FOLDERS)
_WEIGHTS = "model.safetensors"
_SIZE_MAX = 65_536
_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    each.__name__: each for each in (nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid)
}
# The values of other settings that this engine supports. The first is the default.
_OF_SETTINGS: Final[dict[str, tuple[object, ...]]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": (None, "sentence_embedding"),
    "use_residual": (False,),
}
_OF_TOKENS: Final = _OF_SETTINGS | {
    "module_input_name": ("token_embeddings",),
    "module_output_name": (None, "token_embeddings"),
}


def read_dense(directory: Path, folders: tuple[str, ...], size: int, device: torch.device) -> tuple[nn.Sequential, int]:
    """Return the layers in float32 and the size of their vectors. size: of their input. Raises ModelError."""
    layers: list[nn.Module] = []
    settings = _OF_TOKENS if folders[:1] == TOKEN_DENSE_FOLDERS[:1] else _OF_SETTINGS
    for folder in folders:
        linear, activation = _read_layer(directory / folder, size, settings)
        layers += [linear, activation]
        size = linear.out_features
    return nn.Sequential(*layers).to(device).eval().requires_grad_(False), size


def _read_layer(folder: Path, size: int, settings: Mapping[str, tuple[object, ...]]) -> tuple[nn.Linear, nn.Module]:
    path = folder / "config.json"
    config = read_object(path)
    for name, known in settings.items():
        if config.get(name, known[0]) not in known:
            raise ModelError(f"{path} has {name}: {str(config[name])[:100]!r}, which this engine does not support")
    begin, _, named = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if not begin.startswith("torch.nn") or named not in _ACTIVATIONS:
        raise ModelError(f"{path} names the activation {named[:100]!r}; this engine has {', '.join(_ACTIVATIONS)}")
    sizes, has_bias = (config.get("in_features"), config.get("out_features")), config.get("bias", True)
    if sizes[0] != size or type(sizes[1]) is not int or not 1 <= sizes[1] <= _SIZE_MAX or type(has_bias) is not bool:
        raise ModelError(f"{path} does not describe a layer for vectors of {size} numbers")
    linear = nn.Linear(size, sizes[1], bias=has_bias, device="meta")
    linear.load_state_dict(_read_weights(folder / _WEIGHTS, linear), assign=True)
    return linear, _ACTIVATIONS[named]()


def _read_weights(path: Path, linear: nn.Linear) -> dict[str, torch.Tensor]:
    """Return the layer's weights in float32. Raises ModelError if the file has others or cannot be read."""
    expected = {f"linear.{name}": list(each.shape) for name, each in linear.state_dict().items()}
    with open_weights(path) as file:
        if {name: file.get_slice(name).get_shape() for name in file.keys()} != expected:  # noqa: SIM118 (no dict)
            raise ModelError(f"{path} does not have the weights that its config.json describes")
        return {name.removeprefix("linear."): file.get_tensor(name).float() for name in expected}


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises ModelError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}, which the model needs, cannot be read: {error}") from error
