"""Prints gpu-models.md, how many requests a GPU holds of a model by the engine's own plan: `python docs/gpu_models.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

from typing import NamedTuple

from conveyor_engine.config.engine_config import DEFAULT_NUM_SEQS_CUDA, EngineConfig
from conveyor_engine.execution.gpus import GPUS, count_requests

_TOKENS = 4096
_TABLES_OF_8B, _TABLES_OF_32B = 2 * 151_936 * 4096, 2 * 151_936 * 5120  # embeddings and the head

_HEAD = """\
# Which GPU for which model

Written by `make generate`; do not edit.

The number of requests that one GPU can run at the same time, for requests of {tokens:,} tokens (prompt and answer).
**–** means that not even one fits. For requests of half the length, the number is twice as large.

Models have weights in BFloat16, or in the format that the row names
([formats that keep their bits](quantization.md#formats-that-keep-their-bits-on-a-gpu)). The KV cache is in BFloat16.

The table is computed with the engine's own function for the size of the KV cache, at its default of 85 % of the free
memory. No row was run on that GPU. Memory is the value that `nvidia-smi` shows, weights take two bytes for each
parameter or the bits of their format, and 2 GiB are assumed for CUDA and the largest step. A running engine measures
its largest step instead.

An engine with `device: CUDA` runs at most {batch} requests at the same time unless `batching.maxBatchSize` sets another
number. The figures are for one GPU.
Larger models need [several GPUs](several-gpus.md) of one node. No model can span several nodes.
"""


class Model(NamedTuple):
    """As `config.json` has it, and the number of parameters."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    bits: float = 16  # of a weight of a linear layer, with its scales
    plain: float = 0  # parameters in 16 bits: embeddings, and the head


MODELS = (
    Model("Qwen3-0.6B", 0.6e9, 28, 8, 128),
    Model("Qwen3-4B", 4.02e9, 36, 8, 128),
    Model("Mistral-7B-v0.3", 7.25e9, 32, 8, 128),
    Model("Llama-3.1-8B", 8.03e9, 32, 8, 128),
    Model("Qwen3-8B", 8.19e9, 36, 8, 128),
    Model("Qwen3-14B", 14.8e9, 40, 8, 128),
    Model("Qwen3-32B", 32.8e9, 64, 8, 128),
    Model("Qwen3-8B, FP8", 8.19e9, 36, 8, 128, 8.25, _TABLES_OF_8B),
    Model("Qwen3-8B, NVFP4", 8.19e9, 36, 8, 128, 4.5, _TABLES_OF_8B),
    Model("Qwen3-32B, FP8", 32.8e9, 64, 8, 128, 8.25, _TABLES_OF_32B),
    Model("Qwen3-32B, AWQ", 32.8e9, 64, 8, 128, 4.3125, _TABLES_OF_32B),
    Model("Qwen3-32B, NVFP4", 32.8e9, 64, 8, 128, 4.5, _TABLES_OF_32B),
)


def find_cells(model: Model) -> list[str]:
    """Return the numbers of requests of `_TOKENS` tokens, as the table has them."""
    block_bytes = EngineConfig(model="-").block_size * 2 * model.layers * model.kv_heads * model.head_size * 2
    weight_bytes = int(2 * model.plain + (model.parameters - model.plain) * model.bits / 8)
    return [str(count_requests(gpu, weight_bytes, block_bytes, _TOKENS) or "–") for gpu in GPUS]


def main() -> None:
    print(_HEAD.format(tokens=_TOKENS, batch=DEFAULT_NUM_SEQS_CUDA))
    print(f"| model | {' | '.join(gpu.name for gpu in GPUS)} |")
    print(f"| --- |{' --- |' * len(GPUS)}")
    for model in MODELS:
        print(f"| {model.name} | {' | '.join(find_cells(model))} |")


if __name__ == "__main__":
    main()
