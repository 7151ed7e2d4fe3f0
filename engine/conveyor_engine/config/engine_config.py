"""The engine's configuration: one frozen object, parsed once, passed by constructor.

`sources` fills it from flags, environment, file and the defaults here; `docs/configuration.py` writes its table.
What is measured at start (number of KV blocks, end-of-sequence ids) lives elsewhere.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from conveyor_engine.registry import find_packages
from conveyor_process.kinds import (
    DAY_SECONDS,
    LOG_FORMAT,
    PORT,
    TRUE_OR_FALSE,
    WORDS,
    among,
    literal,
    number,
    seconds,
    whole_number,
)
from conveyor_process.log import LogFormat
from conveyor_process.settings import Kind, optional, required, setting
from conveyor_protocol.request_headers import LEVEL_MAX

Device = Literal["cuda", "cpu", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BatchingMode = Literal["auto", "none", "static", "dynamic", "continuous"]
Padding = Literal["none", "real"]
SamplingDefaultsSource = Literal["model", "openai"]
AttentionBackendName = Literal["auto", "torch", "native", "triton"]

DEFAULT_MEMORY_FRACTION = 0.85
MAX_TOKENS = 16_777_216  # of a context, a step, and as many KV blocks


def _parse_shares(text: str) -> tuple[tuple[int, int], ...]:
    """`50:40,100:20` -> ((50, 40), (100, 20))."""
    shares = dict[int, int]()
    for entry in filter(None, text.split(",")):
        match = re.fullmatch("([0-9]{1,4}):([0-9]{1,3})", entry.strip())
        level, percent = map(int, match.groups()) if match else (-1, 0)
        if not (0 <= level <= LEVEL_MAX and 1 <= percent <= 100) or level in shares:
            raise ValueError(entry)
        shares[level] = percent
    return tuple(sorted(shares.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of the engine; the constructor takes any values, so that tests can build odd engines."""

    model: str = required("path of a model directory", WORDS)
    served_model_name: str | None = setting(
        None, "the name that requests use; default: the name of the model's directory", optional(WORDS)
    )
    task: str = setting(
        "auto",
        "what the model does; auto = by the class that config.json names: rerank for ...ForSequenceClassification "
        "with one label, classify for others and for ...ForTokenClassification, embed for an encoder (BertModel, "
        "BertForMaskedLM) or a directory with modules.json, else generate",
        among("auto", *reversed(find_packages())),
    )
    device: Device = setting("cuda", "where to run; auto = cuda if there is a GPU, else cpu", literal(Device))
    dtype: Dtype = setting(
        "auto",
        "type of weights, activations and KV cache; auto = on CUDA bfloat16, or float16 for a model saved in it; "
        "on a CPU bfloat16 if it computes in it, else float32; float16 is not for CPUs",
        literal(Dtype),
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt and output together, in tokens; default: the model's own limit",
        optional(whole_number(2, MAX_TOKENS)),
    )
    sampling_defaults: SamplingDefaultsSource = setting(
        "model",
        "how a request is sampled that does not say it: model = temperature, top_p and top_k of the model's "
        "generation_config.json; openai = temperature 1 and no cut",
        literal(SamplingDefaultsSource),
    )
    batching_mode: BatchingMode = setting(
        "auto",
        "the policy that forms batches; auto = continuous for a model that generates, else dynamic",
        literal(BatchingMode),
    )
    max_num_seqs: int = setting(32, "requests that take part in one step", whole_number(1, 1024))
    batching_window_seconds: float | None = setting(
        None,
        "how long a batch waits to fill up; static and dynamic only; default: the policy's own",
        optional(seconds(3600)),
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "tokens of one step; a longer prompt takes several, or, to be embedded, one to itself; default: by device",
        optional(whole_number(1, MAX_TOKENS)),
    )
    max_num_queued_requests: int = setting(
        256,
        f"requests that may wait for a place; one more is refused with 429, and so is one whose prompt would bring "
        f"those that wait or run beyond {MAX_TOKENS} tokens",
        whole_number(1, 100_000),
    )
    class_shares: tuple[tuple[int, int], ...] = setting(
        (),
        "per cent of the batch's rows and of the KV blocks that requests of a level and of all higher ones may hold "
        "together, as LEVEL:PERCENT; in the file a mapping; one request of them may always run",
        Kind("levels from 0 to 1000 with whole percentages from 1 to 100, as 50:40,100:20", _parse_shares),
    )
    num_kv_blocks: int | None = setting(
        None, "blocks of the KV cache; default: from kv_memory_fraction", optional(whole_number(1, MAX_TOKENS))
    )
    kv_memory_fraction: float | None = setting(
        None,
        f"share of the memory that weights and the largest step leave to the KV cache; default: "
        f"{DEFAULT_MEMORY_FRACTION}, on a CPU at most 4 GiB and what max_num_seqs requests fill",
        optional(number(0.01, 1)),
    )
    block_size: int = setting(16, "tokens of one KV block", whole_number(1, 256))
    prefix_caching: bool = setting(True, "share the KV blocks of identical prompt prefixes", TRUE_OR_FALSE)
    attention_backend: AttentionBackendName = setting(
        "auto", "auto = the fastest that works here", literal(AttentionBackendName)
    )
    enforce_eager: bool = setting(
        False,
        "true = without CUDA graphs: the host launches each kernel of a step of decodes, which takes longer and saves "
        "their memory",
        TRUE_OR_FALSE,
    )
    request_timeout_seconds: float = setting(
        600.0, "longest time of one request; a client may ask for less", seconds(DAY_SECONDS, least=0.001)
    )
    drain_timeout_seconds: float = setting(120.0, "how long running requests may go on after SIGTERM", seconds(3600))
    host: str = setting("0.0.0.0", "address to listen on", WORDS)
    port: int = setting(8000, "port to listen on; 0 = any free one, said in the log", PORT)
    padding: Padding | None = setting(
        None,
        "static only; real (the default) = every row is computed as long as the longest prompt, and on until the "
        "slowest is done, as in a padded tensor; none = packed: rows of their own lengths",
        optional(literal(Padding)),
    )
    num_threads: int | None = setting(
        None, "CPU threads that compute; default: the container's CPU limit", optional(whole_number(1, 1024))
    )
    log_format: LogFormat = setting("logfmt", "form of each line of the log", LOG_FORMAT)
    warmup: bool = setting(True, "run the largest step once before being ready", TRUE_OR_FALSE)


def find_conflicts(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Each field that does not go with another, with the rest of a sentence that begins with the field's name."""
    if config.num_kv_blocks is not None and config.kv_memory_fraction is not None:
        yield "num_kv_blocks", "and `kv_memory_fraction` exclude each other: give one"
    if config.batching_window_seconds is not None and config.batching_mode not in ("static", "dynamic"):
        yield (
            "batching_window_seconds",
            "is for `batching_mode: static` and `batching_mode: dynamic` alone: leave it out",
        )
    if config.padding is not None and config.batching_mode != "static":
        yield "padding", "is for `batching_mode: static` alone: leave it out"
