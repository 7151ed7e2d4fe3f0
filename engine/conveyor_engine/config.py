"""The engine's configuration: one frozen object, parsed once, passed by constructor.

Sources, strongest first: flags, environment (CONVEYOR_ENGINE_<FIELD>), a flat YAML file, the defaults here.
Called by `__main__`. What is measured at start (number of KV blocks, end-of-sequence ids) lives elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

Device = Literal["cuda", "cpu", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BatchingMode = Literal["none", "static", "dynamic", "continuous"]
Padding = Literal["none", "real"]
AttentionBackendName = Literal["auto", "torch", "native", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told. Unknown keys are refused by the parser."""

    model: str  # path of a model directory
    served_model_name: str | None = None  # default: the directory's name
    device: Device = "cuda"
    dtype: Dtype = "auto"
    max_model_len: int | None = None  # tokens, prompt + output; default: the model's own limit
    batching_mode: BatchingMode = "continuous"
    max_num_seqs: int = 32  # requests that take part in one step
    batching_window_seconds: float | None = None  # static, dynamic only; None = the policy's default
    max_num_batched_tokens: int | None = None  # tokens of one step; None = default
    max_num_queued_requests: int = 256  # waiting requests; one more is refused (429)
    num_kv_blocks: int | None = None  # None = from kv_memory_fraction
    kv_memory_fraction: float | None = None  # of the free device memory after loading; None = 0.85
    block_size: int = 16  # tokens per KV block
    prefix_caching: bool = True  # share the KV blocks of identical prompt prefixes
    attention_backend: AttentionBackendName = "auto"  # auto = the fastest that works here
    request_timeout_seconds: float = 600.0
    drain_timeout_seconds: float = 120.0
    host: str = "0.0.0.0"
    port: int = 8000
    padding: Padding = "none"  # "real" makes static pad to its longest row: the literature's baseline
    num_threads: int | None = None  # CPU threads of the engine process; None = the CPU limit
    warmup: bool = True
