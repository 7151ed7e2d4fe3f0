"""Divides a model among ranks, by transformers' own plan for tensor parallelism.

Called by `start`. "Product" means a linear layer here. A `colwise` product keeps the rank's share of its outputs; in
attention these are whole heads. The `rowwise` product after it keeps the matching share of its inputs, so its result is
a partial sum. `SumOfRanks` adds up these sums, twice in a layer. Every rank keeps all other modules whole, including
the embeddings and the LM head. So all ranks have the same logits and choose the same tokens. Source of the method:
Megatron-LM (arXiv 1909.08053).
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final

import torch
import torch.distributed
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution.models.quantized.deferred import Deferred

_COLUMNS, _ROWS = "colwise", "rowwise"
# A module with one of these words in its name or style is part of a mixture of experts. A rank's share of such a part
# is not a slice of a plain product.
_EXPERTS: Final = ("expert", "moe", "grouped", "packed")


class SumOfRanks(nn.Module):
    """Computes a product whose inputs are divided among the ranks, and adds up the results of all ranks."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(x)
        torch.distributed.all_reduce(out)
        return out


def divide_model(model: PreTrainedModel, rank: int, world_size: int) -> list[str]:
    """Keep the rank's share of each product. Return the names of the products whose results must be added up.

    Raises ConfigError if the heads cannot be divided by `world_size`, ModelError if the model has no plan.
    """
    _check_heads(model.config.get_text_config(), world_size)
    products = list(_find_products(model))
    partial_sums = [name for name, style in products if style == _ROWS]
    if not partial_sums:
        raise ModelError(
            f"{type(model).__name__} cannot be divided among {world_size} ranks: transformers has no plan for it; use "
            "`tensor_parallel_size: 1`"
        )
    for name, style in products:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        # A tensor that is made in inference mode cannot be moved to a GPU later. Only in it are operations deferred.
        with torch.no_grad(), torch.inference_mode(isinstance(linear.weight.data, Deferred)):
            _keep_share(linear, 0 if style == _COLUMNS else 1, rank, world_size)
    return partial_sums


def add_up(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Make these products, or the modules that replace them, return the sum of all ranks."""
    for name in names:
        model.set_submodule(name, SumOfRanks(model.get_submodule(name)))


def _find_products(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield (name, style) for each plain product that is divided. Raises ModelError for mixtures of experts."""
    plan: dict[str, str] = model.tp_plan or {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style is not None and any(word in f"{name} {style}" for word in _EXPERTS):
            raise ModelError(
                f"{type(model).__name__} cannot be divided among ranks: {name} has experts, and only plain products "
                "can be divided; use `tensor_parallel_size: 1`"
            )
        if style in (_COLUMNS, _ROWS) and isinstance(module, nn.Linear):
            yield name, style


def _check_heads(config: PretrainedConfig, world_size: int) -> None:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % world_size or kv_heads % world_size:
        raise ConfigError(
            f"`tensor_parallel_size: {world_size}` does not divide the model's heads, {heads} of queries and "
            f"{kv_heads} of keys and values; ask for a number of GPUs that divides both"
        )


def _keep_share(linear: nn.Linear, dim: int, rank: int, world_size: int) -> None:
    """Keep the rank's slice of the weight: a slice of the outputs (dim 0) or of the inputs (dim 1)."""
    size = linear.weight.shape[dim]
    if size % world_size:
        raise ConfigError(
            f"`tensor_parallel_size: {world_size}` does not divide the {size} inputs or outputs of a linear layer; ask "
            "for a number of GPUs that does"
        )
    linear.weight = _share(linear.weight, dim, rank, world_size)
    if linear.bias is not None and dim == 0:
        linear.bias = _share(linear.bias, 0, rank, world_size)
    elif linear.bias is not None and rank > 0:
        linear.register_parameter("bias", None)  # rank 0 alone adds the bias
    linear.out_features, linear.in_features = linear.weight.shape


def _share(weight: torch.Tensor, dim: int, rank: int, world_size: int) -> nn.Parameter:
    share = weight.data.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(share, requires_grad=False)
