"""The engine's configuration: one frozen object, parsed once, passed by constructor.

`sources` fills it from flags, environment, file and the defaults here, `documentation` writes its table.
What is measured at start (number of KV blocks, end-of-sequence ids) lives elsewhere. Imports nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

Device = Literal["cuda", "cpu", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BatchingMode = Literal["none", "static", "dynamic", "continuous"]
Padding = Literal["none", "real"]
SamplingDefaultsSource = Literal["model", "openai"]
AttentionBackendName = Literal["auto", "torch", "native", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told; each field's annotation says what it means.

    The constructor takes any values, so that tests can build odd engines; `limits_broken` is asked by the parser.
    """

    model: Annotated[str, "path of a model directory"]
    served_model_name: Annotated[
        str | None, "the name that requests use; default: the name of the model's directory"
    ] = None
    device: Annotated[Device, "where to run; auto = cuda if there is one, else cpu"] = "cuda"
    dtype: Annotated[
        Dtype,
        "type of weights, activations and KV cache; auto = on CUDA bfloat16, or float16 for a model saved in it and "
        "where there is no bfloat16; on a CPU bfloat16 if it computes in it, else float32; float16 is not for CPUs",
    ] = "auto"
    max_model_len: Annotated[
        int | None, "longest prompt and output together, in tokens; default: the model's own limit"
    ] = None
    sampling_defaults: Annotated[
        SamplingDefaultsSource,
        "how a request is sampled that does not say it: model = temperature, top_p and top_k of the model's "
        "generation_config.json; openai = temperature 1 and no cut",
    ] = "model"
    batching_mode: Annotated[BatchingMode, "the policy that forms batches"] = "continuous"
    max_num_seqs: Annotated[int, "requests that take part in one step"] = 32
    batching_window_seconds: Annotated[
        float | None, "how long a batch waits to fill up; static and dynamic only; default: the policy's own"
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, "tokens computed in one step; longer prompts take several; default: by device"
    ] = None
    max_num_queued_requests: Annotated[int, "requests that may wait for a place; one more is refused with 429"] = 256
    num_kv_blocks: Annotated[int | None, "blocks of the KV cache; default: from kv_memory_fraction"] = None
    kv_memory_fraction: Annotated[
        float | None,
        "share of the memory that weights and the largest step leave to the KV cache; default: 0.85, on a CPU at most "
        "4 GiB and what max_num_seqs requests fill",
    ] = None
    block_size: Annotated[int, "tokens of one KV block"] = 16
    prefix_caching: Annotated[bool, "share the KV blocks of identical prompt prefixes"] = True
    attention_backend: Annotated[AttentionBackendName, "auto = the fastest that works here"] = "auto"
    request_timeout_seconds: Annotated[float, "longest time of one request; a client may ask for less"] = 600.0
    drain_timeout_seconds: Annotated[float, "how long running requests may go on after SIGTERM"] = 120.0
    host: Annotated[str, "address to listen on"] = "0.0.0.0"
    port: Annotated[int, "port to listen on; 0 = any free one, said in the log"] = 8000
    padding: Annotated[
        Padding | None,
        "static only; real (the default) = every row is computed as long as the longest prompt, and on until the "
        "slowest is done, as in a padded tensor; none = packed: rows of their own lengths",
    ] = None
    num_threads: Annotated[int | None, "CPU threads that compute; default: the container's CPU limit"] = None
    warmup: Annotated[bool, "run the largest step once before being ready"] = True


# Smallest and largest value of each number.
RANGES: dict[str, tuple[float, float]] = {
    "max_model_len": (2, math.inf),
    "max_num_seqs": (1, 1024),
    "batching_window_seconds": (0, 3600),
    "max_num_batched_tokens": (1, math.inf),
    "max_num_queued_requests": (0, 1_000_000),
    "num_kv_blocks": (1, math.inf),
    "kv_memory_fraction": (0.01, 1),
    "block_size": (1, 256),
    "request_timeout_seconds": (0.001, 86_400),
    "drain_timeout_seconds": (0, 86_400),
    "port": (0, 65_535),
    "num_threads": (1, 1024),
}


def limits_broken(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Each field whose value cannot be, with the rest of a sentence that begins with the field's name."""
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield name, f"must be {bounds}, not {value:g}"
    if not config.model:
        yield "model", "must not be empty"
    if config.served_model_name == "":
        yield "served_model_name", "must not be empty"
    if config.num_kv_blocks is not None and config.kv_memory_fraction is not None:
        yield "num_kv_blocks", "and `kv_memory_fraction` exclude each other: give one"
    if config.batching_window_seconds is not None and config.batching_mode not in ("static", "dynamic"):
        yield "batching_window_seconds", f"means nothing in `batching_mode: {config.batching_mode}`: leave it out"
    if config.padding is not None and config.batching_mode != "static":
        yield "padding", f"means nothing in `batching_mode: {config.batching_mode}`: leave it out"
