"""The engine's configuration: one frozen object, which is parsed once and passed to constructors.

`sources` fills it from flags, environment, file and the defaults here. `docs/configuration.py` generates the table of
settings. Values that the engine finds at its start, such as the number of KV blocks that fit, are in `ModelFacts`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from conveyor_engine.config.kinds import ADAPTERS, CLASS, LENGTHS, MAX_TOKENS, SHARES
from conveyor_engine.registry import find_packages
from conveyor_process.kinds import (
    DAY_SECONDS,
    HOSTS_AND_PORTS,
    LOG_FORMAT,
    PORT,
    TEXT,
    TRUE_OR_FALSE,
    WORDS,
    among,
    literal,
    number,
    seconds,
    whole_number,
)
from conveyor_process.log import LogFormat
from conveyor_process.settings import optional, required, setting
from conveyor_protocol.workload import Lengths, Workload

Device = Literal["cuda", "cpu", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BatchingMode = Literal["auto", "none", "static", "dynamic", "continuous"]
Padding = Literal["none", "real"]
LengthGrouping = Literal["auto", "off"]
SamplingDefaultsSource = Literal["model", "openai"]
ToolParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "llama4_pythonic", "mistral", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "deepseek_v41", "glm45", "minimax_m2", "seed_oss", "granite", "jamba", "internlm",
    "phi4_mini_json", "lfm2", "openai", "kimi_k2", "gemma4", "functiongemma", "longcat", "olmo3", "cohere_command3",
]  # fmt: skip
ReasoningParser = Literal["auto", "none", "think", "mistral", "seed_oss", "openai_gptoss", "gemma4", "cohere_command3"]
KVCacheDtype = Literal["auto", "fp8", "int8"]
Quantization = Literal["int8", "int4"]
SpeculationMethod = Literal["ngram", "draft", "mtp"]
GUESSING: Final = ("draft", "mtp")  # methods with a model that guesses
AttentionBackendName = Literal["auto", "torch", "native", "triton"]

DEFAULT_MEMORY_FRACTION = 0.85
DEFAULT_NUM_SEQS = 32
DEFAULT_NUM_SEQS_CUDA = 256  # for models that generate text: a step of few rows costs almost as much as one of many


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of the engine. The constructor does not check them, so that tests can build unusual engines."""

    model: str = required("path of a model directory", WORDS)
    served_model_name: str | None = setting(
        None, "the name that requests use; default: the name of the model's directory", optional(WORDS)
    )
    adapters: tuple[tuple[str, str], ...] = setting(
        (),
        "NAME=DIRECTORY of LoRA adapters in PEFT's format, with commas between (a mapping in the file). "
        "Requests select one by the model's name, a colon and the adapter's",
        ADAPTERS,
    )
    adapters_file: str = setting(
        "",
        "YAML file of further LoRA adapters, which may change while the engine runs: NAME: {uri: ..., directory: ...}. "
        "The engine downloads, loads and unloads them. An adapter that cannot be loaded ends no other request",
        TEXT,
    )
    adapters_folder: str = setting("", "its own folder, where it removes downloads that `adapters_file` lacks", TEXT)
    adapter_slots: int = setting(
        16,
        "adapters of `adapters_file` on the device at a time; the least recently used ones leave",
        whole_number(1, 256),
    )
    task: str = setting(
        "auto",
        "task of the model. auto = custom for model.pt2 without config.json, imagegenerate for model_index.json, "
        "otherwise by the class in config.json: imageclassify for ...ForImageClassification; transcribe for "
        "WhisperForConditionalGeneration; rerank for ...ForSequenceClassification with one label; classify for "
        "...ForSequenceClassification with several labels, and for ...ForTokenClassification; embed for an encoder "
        "(BertModel, BertForMaskedLM) or a directory with modules.json; generate for all others",
        among("auto", *reversed(find_packages())),
    )
    model_class: str | None = setting(
        None,
        "the Python class that is the model, as package.module:Class, for `task: custom`; default: the program in "
        "model.pt2",
        optional(CLASS),
    )
    device: Device = setting("cuda", "where to run; auto = cuda if there is a GPU, otherwise cpu", literal(Device))
    dtype: Dtype = setting(
        "auto",
        "type of weights, activations and KV cache. auto on CUDA = float16 for a model saved in float16, otherwise "
        "bfloat16; auto on a CPU = bfloat16 if the CPU computes in bfloat16, otherwise float32. CPUs do not support "
        "float16",
        literal(Dtype),
    )
    quantization: Quantization | None = setting(
        None,
        "rounds the weights of linear layers when the model is loaded: int8 = 8 bits, int4 = 4 bits, and 8 "
        "for the head; default: the weights stay as they are",
        optional(literal(Quantization)),
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt and output together, in tokens; default: the model's own limit",
        optional(whole_number(2, MAX_TOKENS)),
    )
    sampling_defaults: SamplingDefaultsSource = setting(
        "model",
        "sampling parameters of requests that do not set them: model = temperature, top_p, top_k, min_p and "
        "repetition_penalty of the model's generation_config.json; openai = temperature 1, without top_p and top_k",
        literal(SamplingDefaultsSource),
    )
    tool_parser: ToolParser = setting(
        "auto",
        "format of the tool calls that the model writes into its answers; auto = by the model's chat template",
        literal(ToolParser),
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        "format of the model's thinking, which becomes `reasoning`; auto = by the model's chat template; none = "
        "thinking stays in `content`",
        literal(ReasoningParser),
    )
    batching_mode: BatchingMode = setting(
        "auto",
        "the policy that forms batches; auto = continuous for a model that generates text or pictures or transcribes "
        "speech, otherwise dynamic",
        literal(BatchingMode),
    )
    max_num_seqs: int | None = setting(
        None,
        f"maximum number of requests in one step; default: {DEFAULT_NUM_SEQS_CUDA} for a model that generates text on "
        f"CUDA, otherwise {DEFAULT_NUM_SEQS}",
        optional(whole_number(1, 1024)),
    )
    batching_window_seconds: float | None = setting(
        None,
        "static and dynamic only; how long a batch waits for more requests; default: the policy's own",
        optional(seconds(3600)),
    )
    batching_eager: bool = setting(
        False,
        "static and dynamic only; true = an idle engine starts a batch with the waiting requests at once, without "
        "waiting for the window",
        TRUE_OR_FALSE,
    )
    length_grouping: LengthGrouping = setting(
        "auto",
        "static and dynamic only; auto = a batch prefers requests of similar length, if batches are padded or if "
        "answers of different lengths wait for each other. A request whose window is over joins the next batch with "
        "room, whatever its length; off = requests join in the queue's order",
        literal(LengthGrouping),
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum number of tokens in one step; default: depends on the device. A longer prompt is split over several "
        "steps. In tasks that compute a request in one step, such as embed, a longer prompt runs alone in a step. If "
        "set, a static or dynamic batch is also full when its cost reaches this number. The cost of packed prompts is "
        "the sum of their tokens. The cost of padded prompts is their number times the longest. For tasks that take "
        "one step, the default also limits the cost",
        optional(whole_number(1, MAX_TOKENS)),
    )
    speculation: SpeculationMethod | None = setting(
        None,
        "drafts the next tokens of answers, for a model that generates text, on CPUs: ngram = what followed the last "
        "tokens earlier in prompt or answer; draft = the guesses of `draft_model`; mtp = those of the head for "
        "multi-token prediction in the model's files. Steps compute drafts only while "
        "these save time. Default: no drafts",
        optional(literal(SpeculationMethod)),
    )
    draft_model: str | None = setting(
        None,
        "path of the directory or GGUF file of a smaller model with the same tokenizer, or the directory of an EAGLE-3 "
        "head of the model, for `speculation: draft`",
        optional(WORDS),
    )
    speculation_tokens: int = setting(8, "most draft tokens of one request in a step", whole_number(1, 16))
    max_num_queued_requests: int = setting(
        256,
        f"maximum number of requests that wait for a place in the batch. Further requests get 429. A request also gets "
        f"429 if the prompts of all waiting and running requests would together exceed {MAX_TOKENS} tokens",
        whole_number(1, 100_000),
    )
    objective_time_to_first_token_seconds: float | None = setting(
        None,
        "objective for the P95 of the time to the first token, for a model that generates text. The engine adapts the "
        "number of prompt tokens in a step. The time during which a request waits for room in the batch does not count",
        optional(seconds(3600, least=0.001)),
    )
    objective_inter_token_latency_seconds: float | None = setting(
        None,
        "objective for the P95 of the time between two tokens of an answer. The engine adapts the rows and the prompt "
        "tokens of a step, up to the declared limits",
        optional(seconds(3600, least=0.001)),
    )
    objective_latency_seconds: float | None = setting(
        None,
        "objective for the P95 of a request's time, for a task of one step. The engine adapts the rows of a step",
        optional(seconds(3600, least=0.001)),
    )
    class_shares: tuple[tuple[int, int], ...] = setting(
        (),
        "LEVEL:PERCENT: requests whose level is LEVEL or a higher number together get at most PERCENT of the batch's "
        "rows and of the KV blocks. One such request may always run. In the file, this is a mapping",
        SHARES,
    )
    num_kv_blocks: int | None = setting(
        None,
        "number of blocks in the KV cache; default: from kv_memory_fraction",
        optional(whole_number(1, MAX_TOKENS)),
    )
    kv_memory_fraction: float | None = setting(
        None,
        f"the KV cache's share of the memory that the weights and the largest step leave free; default: "
        f"{DEFAULT_MEMORY_FRACTION}. On a CPU without this setting, the cache has at most 4 GiB (unless one request "
        "needs more), and at most the memory that max_num_seqs requests fill",
        optional(number(0.01, 1)),
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "type of the KV cache, on CUDA; auto = the type from dtype. int8 and fp8 (e4m3, for compute capability 8.9 or "
        "newer) hold almost twice the tokens in the same memory. Values are rounded, with a scale for each token and "
        "head",
        literal(KVCacheDtype),
    )
    block_size: int = setting(16, "tokens in one KV block", whole_number(1, 256))
    workload_input_tokens: Lengths | None = setting(
        None,
        "tokens of a prompt at P50 and P95, such as 256,1024. The engine derives the CUDA graphs and the warm-up from "
        "these lengths. It also derives the context and the KV blocks, if they are not set",
        optional(LENGTHS),
    )
    workload_output_tokens: Lengths | None = setting(
        None, "tokens of an answer at P50 and P95, for a model that generates text", optional(LENGTHS)
    )
    prefix_caching: bool = setting(True, "share the KV blocks of identical prompt prefixes", TRUE_OR_FALSE)
    attention_backend: AttentionBackendName = setting(
        "auto", "attention kernels; auto = the fastest kernels that work on this device", literal(AttentionBackendName)
    )
    enforce_eager: bool = setting(
        False,
        "true = without CUDA graphs: the host launches each kernel of a decode step. This is slower, but saves the "
        "memory of the graphs",
        TRUE_OR_FALSE,
    )
    request_timeout_seconds: float = setting(
        600.0, "time limit for one request; a client can set a shorter time", seconds(DAY_SECONDS, least=0.001)
    )
    drain_timeout_seconds: float = setting(120.0, "how long running requests may continue after SIGTERM", seconds(3600))
    host: str = setting("", "address to listen on; empty: all addresses", TEXT)
    port: int = setting(8000, "port to listen on; 0 = any free port, which is logged", PORT)
    tls_folder: str = setting(
        "",
        "folder with `tls.crt` and `tls.key`, such as a mounted Secret: the port then serves TLS, and loads new files "
        "within seconds; empty: no TLS",
        TEXT,
    )
    callers_file: str = setting(
        "",
        "JSON file with the ServiceAccounts that may use the engine, and the keys that verify their tokens. Others get "
        "401, except for health and metrics; a new content is loaded within seconds; empty: everyone may use it",
        TEXT,
    )
    media_hosts: tuple[str, ...] = setting(
        (),
        "hosts from which images in chats are fetched, if a URL with https:// names one; empty: none is fetched. "
        "Without a port, it is 443. All addresses of a host must be public, unless HTTPS_PROXY sets a proxy",
        HOSTS_AND_PORTS,
    )
    padding: Padding | None = setting(
        None,
        "static only; real (the default) = every row is padded to the longest prompt, and is computed until the "
        "slowest row is done; none = rows are packed with their own lengths",
        optional(literal(Padding)),
    )
    tensor_parallel_size: int = setting(
        1,
        "number of devices (on a CPU: processes) that compute one model together, each with a share of the heads. For "
        "models that generate text; others use one",
        whole_number(1, 1024),
    )
    num_threads: int | None = setting(
        None,
        "number of CPU threads; default: OMP_NUM_THREADS, or the container's CPU limit",
        optional(whole_number(1, 1024)),
    )
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)
    warmup: bool = setting(
        True,
        "before being ready, run the largest step, a step with each adapter and the steps of the workload, "
        "and reject a model if none of its results is finite",
        TRUE_OR_FALSE,
    )

    @property
    def workload(self) -> Workload | None:
        """Return the declared lengths of requests; None if none are declared."""
        inputs = self.workload_input_tokens
        return None if inputs is None else Workload(inputs, self.workload_output_tokens)

    def choose_num_seqs(self, default: int = DEFAULT_NUM_SEQS) -> int:
        """Return the most requests of a step: 1 in mode none, otherwise `max_num_seqs`.

        If `max_num_seqs` is not set, returns `default`, but at most `max_num_batched_tokens`.
        """
        if self.batching_mode == "none":
            return 1
        return self.max_num_seqs or min(default, self.max_num_batched_tokens or default)


def find_conflicts(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield each field that conflicts with another, and the error without the field's name in front."""
    if config.num_kv_blocks is not None and config.kv_memory_fraction is not None:
        yield "num_kv_blocks", "and `kv_memory_fraction` exclude each other: give one"
    if config.batching_window_seconds is not None and config.batching_mode not in ("static", "dynamic"):
        yield (
            "batching_window_seconds",
            "is for `batching_mode: static` and `batching_mode: dynamic` alone: leave it out",
        )
    for name, is_set in (
        ("batching_eager", config.batching_eager),
        ("length_grouping", config.length_grouping == "off"),
    ):
        if is_set and config.batching_mode not in ("static", "dynamic"):
            yield name, "is for `batching_mode: static` and `batching_mode: dynamic` alone: leave it out"
    tokens = config.objective_time_to_first_token_seconds or config.objective_inter_token_latency_seconds
    if config.objective_latency_seconds and tokens:
        yield (
            "objective_latency_seconds",
            "is for models that take one step, `objective_time_to_first_token_seconds` and "
            "`objective_inter_token_latency_seconds` are for models that generate: give one or the others",
        )
    if (config.objective_latency_seconds or tokens) and config.batching_mode in ("none", "static"):
        named = config.objective_latency_seconds and "objective_latency_seconds"
        named = named or (config.objective_time_to_first_token_seconds and "objective_time_to_first_token_seconds")
        why = "is for `batching_mode: continuous` and `batching_mode: dynamic` alone: leave it out"
        yield named or "objective_inter_token_latency_seconds", why
    if config.model_class is not None and config.task != "custom":
        yield "model_class", "is for `task: custom` alone: set it, or leave this out"
    if (config.adapters or config.adapters_file) and config.tensor_parallel_size > 1:
        name = "adapters" if config.adapters else "adapters_file"
        yield name, "and `tensor_parallel_size` exclude each other: adapters cannot be divided among devices yet"
    if config.speculation is not None and config.batching_mode == "static":
        yield "speculation", "is not for `batching_mode: static`, whose rows compute one token each: leave it out"
    yield from _find_conflicts_of_draft(config)
    yield from _find_conflicts_of_workload(config)
    if config.padding is not None and config.batching_mode != "static":
        yield "padding", "is for `batching_mode: static` alone: leave it out"


def _find_conflicts_of_draft(config: EngineConfig) -> Iterator[tuple[str, str]]:
    if config.speculation != "draft" and config.draft_model is not None:
        yield "draft_model", "is for `speculation: draft` alone: set that, or leave it out"
    if config.speculation == "draft" and config.draft_model is None:
        yield "speculation", "draft needs `draft_model`: give both"
    if config.speculation in GUESSING and config.tensor_parallel_size > 1:
        name = "draft_model" if config.speculation == "draft" else "speculation"
        why = "draft models and heads cannot be divided among devices"
        yield name, f"and `tensor_parallel_size` exclude each other: {why}"


def _find_conflicts_of_workload(config: EngineConfig) -> Iterator[tuple[str, str]]:
    workload = config.workload
    if workload is None:
        if config.workload_output_tokens is not None:
            yield "workload_output_tokens", "needs `workload_input_tokens`: give both"
        return
    blocks = config.num_kv_blocks and config.num_kv_blocks * config.block_size
    for name, limit in (("`max_model_len`", config.max_model_len), ("`num_kv_blocks` x `block_size`", blocks)):
        if limit is not None and workload.long_tokens > limit:
            yield (
                "workload_input_tokens",
                f"and `workload_output_tokens` have {workload.long_tokens} tokens at P95, more than {name}, {limit}: "
                "raise that, or lower them",
            )
