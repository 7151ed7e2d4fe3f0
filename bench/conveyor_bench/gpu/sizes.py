"""The sizes of everything that the suite measures, on a GPU and in a rehearsal on a CPU. Plain data."""

from dataclasses import dataclass

from conveyor_engine.config.engine_config import Device, Dtype, KVCacheDtype


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one size that arrive together."""

    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all stages."""

    device: Device
    dtype: Dtype
    chosen_tests: str | None  # which `gpu` tests to run, for pytest's -k; None: all
    chosen_tests_of_tasks: str | None  # the same for the stage `tasks`
    copied_bytes: int  # copied to measure the bandwidth
    product_width: int  # of the matrices whose product measures the FLOP/s
    seconds_each: float  # least time of the measurement for one figure of a kernel
    uncached_bytes: int  # least size of a kernel's data, so that caches hold none of it for the next call
    decode_rows: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    decodes_of_8_bits: tuple[tuple[int, int], ...]  # (rows, context) of decodes over caches in fp8 and int8
    prompts: tuple[int, ...]  # tokens
    groups: tuple[int, ...]  # query heads of each KV head
    kv_heads: int
    head_dim: int
    step_tokens: tuple[int, ...]  # tokens for which norms, heads and activations are measured
    hidden: int
    intermediate: int
    vocabulary: int
    small: str  # a name in `comparing.shapes`
    large: str
    nano_requests: int
    nano_tokens: tuple[int, int]  # fewest and most tokens, of prompts and of answers
    one: Batch
    first_tokens: tuple[int, ...]  # lengths of prompts, whose first tokens are timed
    beside: Batch  # decodes beside prompts that are as long as the prompts of `one`
    burst: Batch
    streams: Batch
    profiled: Batch  # one profiled step for each output token
    peer_seconds: float  # time limit for transformers; tokens made until then count
    curve_models: tuple[tuple[str, KVCacheDtype], ...]  # names in `comparing.shapes` or `curve`
    curve_rows: tuple[int, ...]
    curve_prompt: int  # tokens
    product_rows: tuple[int, ...]
    experts: tuple[int, int, int, int]  # of a layer, of each token, the size of their inputs and the inner one
    packed_formats: tuple[str, ...] | None  # names in `weight_formats`; None: all
    cores: tuple[int, ...]  # on which `nano` is repeated
    kv_cache_dtypes: tuple[KVCacheDtype, ...] = ("auto",)  # of nano's engines
    enforce_eager: bool = False  # engines without CUDA graphs


ON_A_GPU = Sizes(
    device="cuda",
    dtype="bfloat16",
    chosen_tests=None,
    chosen_tests_of_tasks=None,
    copied_bytes=4 * 2**30,
    product_width=8192,
    seconds_each=0.2,
    uncached_bytes=512 * 2**20,
    decode_rows=(1, 64, 256),
    decode_contexts=(1024, 4096, 32768),
    decodes_of_8_bits=((64, 1024), (64, 4096), (256, 1024), (256, 4096)),
    prompts=(2048, 8192),
    groups=(2, 8),
    kv_heads=8,
    head_dim=128,
    step_tokens=(256, 8192),
    hidden=4096,
    intermediate=12288,
    vocabulary=151936,
    small="qwen3-0.6b",
    large="qwen3-8b",
    nano_requests=256,
    nano_tokens=(100, 1024),
    one=Batch(1, 128, 512),
    first_tokens=(16, 128, 512, 2048, 8192),
    beside=Batch(64, 512, 512),
    burst=Batch(256, 512, 256),
    streams=Batch(256, 128, 256),
    profiled=Batch(256, 512, 20),
    peer_seconds=240,
    curve_models=(
        ("qwen3-0.6b", "auto"),
        ("qwen3-0.6b", "fp8"),
        ("qwen3-8b", "auto"),
        ("qwen3-8b", "fp8"),
        ("llama-3.1-8b", "auto"),
        ("gemma-3-4b", "auto"),
        ("qwen3-30b-a3b", "auto"),
        ("qwen3.5-9b", "auto"),
    ),
    curve_rows=(1, 2, 3, 4, 8, 16, 32, 64, 128, 256),
    curve_prompt=512,
    product_rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 2048),
    experts=(128, 8, 2048, 768),
    packed_formats=None,
    cores=(1, 2, 4),
    kv_cache_dtypes=("auto", "fp8", "int8"),
)

REHEARSED = Sizes(
    device="cpu",
    dtype="float32",
    chosen_tests="llama and (every_kind or halves or two_engines or continuous-ahead) or bert",
    chosen_tests_of_tasks="every_scheduler and DDIM or every_mode and dynamic",
    copied_bytes=2**20,
    product_width=64,
    seconds_each=0.0,
    uncached_bytes=0,
    decode_rows=(2,),
    decode_contexts=(48,),
    decodes_of_8_bits=((2, 48),),
    prompts=(20,),
    groups=(2,),
    kv_heads=2,
    head_dim=16,
    step_tokens=(4,),
    hidden=64,
    intermediate=128,
    vocabulary=1000,
    small="tiny",
    large="tiny",
    nano_requests=6,
    nano_tokens=(3, 12),
    one=Batch(1, 8, 6),
    first_tokens=(5, 12),
    beside=Batch(3, 4, 80),
    burst=Batch(4, 10, 5),
    streams=Batch(4, 16, 8),
    profiled=Batch(4, 8, 3),
    peer_seconds=5,
    curve_models=(("tiny", "auto"), ("tiny-gemma", "auto"), ("tiny-experts", "auto"), ("tiny-states", "auto")),
    curve_rows=(1, 3),
    curve_prompt=8,
    product_rows=(1, 3),
    experts=(2, 1, 256, 256),
    packed_formats=("Q4_K", "Q6_K", "NVFP4", "AWQ"),
    cores=(1,),
)
