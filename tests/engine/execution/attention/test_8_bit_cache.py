"""Tests the cache in 8 bits, on a GPU or otherwise in Triton's interpreter.

Kernels are compared with plain torch on the same rounded numbers, and a whole engine with transformers. The interpreter
rounds float32 to e4m3 wrongly (127.9 becomes 64). So without a GPU, plain torch writes the numbers that the kernels
read.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.execution.attention.test_cpu_native import make_metadata
from tests.engine.execution.attention.test_triton_backend import LAYERS, STEPS, run_steps
from tests.engine.execution.interpreter import DEVICE, HAVE_GPU, ON_DEVICE, TOLERANCE, in_types
from tests.engine.references import Reference, add, run
from triton import jit
from triton import language as tl

from conveyor_engine import execution
from conveyor_engine.config.engine_config import AttentionBackendName, KVCacheDtype
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Exact, LayerShape
from conveyor_engine.execution.attention.select import select_backend
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels.heads import HeadNorms, prepare_heads
from conveyor_engine.execution.kernels.kv_store import store
from conveyor_engine.execution.kernels.pairs import convert_pairs
from conveyor_engine.execution.kernels.slot_cache import SlotCache
from conveyor_engine.tasks.generate.execution import runner

pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"), *ON_DEVICE]

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [INT8, E4M3], ids=["int8", "e4m3"])
WRITTEN = pytest.mark.parametrize(
    "kv_dtype",
    [
        INT8,
        pytest.param(
            E4M3,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not HAVE_GPU, reason="needs a GPU: the interpreter rounds wrongly"),
            ],
        ),
    ],
    ids=["int8", "e4m3"],
)
CUDA = torch.device("cuda")
LONG_DECODES: list[tuple[list[tuple[int, int]], int]] = [([(1, 1300), (1, 5), (1, 300)], 0)]


def in_8_bits(x: torch.Tensor, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert x (..., D) to (numbers of `kv_dtype`, a scale for each vector (..., 1), float32).

    It uses the same operations as the kernels, because 16-bit numbers often lie half way between two 8-bit ones.
    """
    scales = x.float().abs().amax(-1, keepdim=True)
    largest = 127.0 if kv_dtype == INT8 else 448.0
    numbers = x.float() * scales.new_tensor(largest).div(scales.clamp_min(1e-30))  # `/` takes the reciprocal first
    return ((numbers + 0.5).floor() if kv_dtype == INT8 else numbers).to(kv_dtype), scales


def rounded(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Return x (..., D) rounded to 8 bits."""
    numbers, scales = in_8_bits(x, kv_dtype)
    return numbers.float() / (127 if kv_dtype == INT8 else 448) * scales


class Rounded(TorchPaged):
    """Plain torch in float32. Prompts see the exact keys and values of their own step, and otherwise rounded ones."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        super().__init__(torch.float32)
        self._rounded_to = kv_dtype

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        super().write_kv(layer, rounded(key, self._rounded_to), rounded(value, self._rounded_to), metadata)

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, exact: Exact | None = None
    ) -> torch.Tensor:
        out = super().attend(spec, query.float(), metadata)
        if exact is not None and not spec.values_are_keys:
            super().write_kv(spec.layer, *(each.float() for each in exact), metadata)
            of_prompts = slice(metadata.num_decodes, None)
            out[of_prompts] = super().attend(spec, query.float(), metadata)[of_prompts]
            self.write_kv(spec.layer, *exact, metadata)
        return out


class WrittenByTorch(TritonPaged):
    """Our kernels, reading a cache that plain torch has written."""

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        slots = metadata.slot_mapping[: metadata.num_tokens]
        for source, cache in self.pair(layer, key, value):
            numbers, scales = in_8_bits(source[: metadata.num_tokens], cache.numbers.dtype)
            assert cache.scales is not None
            cache.numbers.view(torch.uint8)[slots] = numbers.view(torch.uint8)
            cache.scales[:, slots] = scales[..., 0].t()


def make_backend(num_processors: int, kv_dtype: torch.dtype) -> TritonPaged:
    return (TritonPaged if HAVE_GPU or kv_dtype == INT8 else WrittenByTorch)(num_processors, kv_dtype)


def held(cache: SlotCache) -> torch.Tensor:
    """Return the content of the cache, (slots, Hkv, D), float32."""
    assert cache.scales is not None
    return cache.numbers.float() / cache.largest * cache.scales.t()[..., None]


def assert_agrees(
    kv_dtype: torch.dtype, dtype: torch.dtype = torch.float32, num_processors: int = 1, **case: object
) -> None:
    expected = run_steps(Rounded(kv_dtype), dtype, **case)  # type: ignore[arg-type]
    actual = run_steps(make_backend(num_processors, kv_dtype), dtype, **case)  # type: ignore[arg-type]
    error = (actual - expected).abs().max()
    assert error < TOLERANCE[dtype], f"differ by {error:.1e}"  # NaN fails: it compares false


@jit
def _convert(pairs, first, second, IS_INT8: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = convert_pairs(tl.load(pairs + places), IS_INT8, first.dtype.element_ty)
    tl.store(first + places, low)
    tl.store(second + places, high)


@KV_DTYPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_pair_of_numbers_is_converted_exactly(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    pairs = torch.arange(-(2**15), 2**15, device=DEVICE, dtype=torch.int32).to(torch.int16)
    first, second = torch.empty_like(pairs, dtype=dtype), torch.empty_like(pairs, dtype=dtype)
    _convert[(64,)](pairs, first, second, IS_INT8=kv_dtype == INT8, BLOCK=1024)
    expected = pairs.view(kv_dtype).to(dtype).reshape(-1, 2)
    is_number = ~expected.isnan()  # the interpreter has other numbers for e4m3's NaN
    torch.testing.assert_close(torch.stack([first, second], -1)[is_number], expected[is_number], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kv_dtype", "steps"),
    [
        pytest.param(INT8, STEPS, id="int8, prompts"),
        pytest.param(E4M3, LONG_DECODES, id="e4m3, long decodes"),
        pytest.param(INT8, LONG_DECODES, id="int8, long decodes", marks=pytest.mark.slow),
        pytest.param(E4M3, STEPS, id="e4m3, prompts", marks=pytest.mark.slow),
    ],
)
def test_values_that_are_in_their_keys_have_the_scales_of_these(kv_dtype: torch.dtype, steps: Any) -> None:
    layers = [LayerShape(20, 1, 48, 32, values_are_keys=True)] * 2
    assert_agrees(kv_dtype, num_processors=8, layers=layers, steps=steps)


@KV_DTYPES
def test_many_keys_of_small_probability_count_beside_one_without_a_value(kv_dtype: torch.dtype) -> None:
    """Each of 127 keys has a probability of e^-11 times that of the first key, whose value is zero.

    One program sees all keys. Multiplied by the scale of their values, 0.01, these probabilities are below the normal
    numbers of float16.
    """
    backend, metadata = TritonPaged(1, kv_dtype), make_metadata([(1, 128)], 0)
    for name in ("query_start_loc", "seq_lens", "block_tables"):
        setattr(metadata, name, getattr(metadata, name).to(DEVICE))
    backend.allocate([LayerShape(2, 1, 32, 32)], 256, 16, torch.float16, DEVICE)
    keys, values = backend.caches(0)
    assert keys.scales is not None
    assert values.scales is not None
    values.numbers.view(torch.uint8)[:] = torch.full((1,), values.largest).to(kv_dtype).view(torch.uint8).item()
    values.scales[:] = 0.01
    first = metadata.block_tables[0, 0].item() * 16
    values.scales[:, first] = 0
    keys.numbers.view(torch.uint8)[first] = values.numbers.view(torch.uint8)[-1]
    keys.scales[:, first] = 11
    query = torch.full((1, 2, 32), 1 / 32, dtype=torch.float16, device=DEVICE)
    out = backend.attend(AttentionSpec(0, 1.0, None, None), query, metadata)
    others = 127 * math.exp(-11)
    torch.testing.assert_close(out, torch.full_like(out, 0.01 * others / (1 + others)), rtol=0.02, atol=0)


@pytest.mark.slow
@KV_DTYPES
@in_types("window, cap", (None, None), (20, 2.0))
def test_decodes_prompts_and_chunks_are_attention_over_the_rounded_numbers(
    kv_dtype: torch.dtype, dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    assert_agrees(kv_dtype, dtype, window=window, cap=cap)


@pytest.mark.parametrize("window", [None, 50])
def test_a_chunk_sees_the_rounded_keys_of_earlier_steps_and_its_own_exact_ones(window: int | None) -> None:
    steps = [([(70, 70), (3, 3)], 0), ([(1, 4), (40, 110), (2, 2)], 3)]
    layers = [LayerShape(4, 2, 16, 16)]
    assert_agrees(INT8, window=window, layers=layers, steps=steps)
    of_all_rounded = [([(1, 4), (40, 110), (2, 2)], 3)]
    whole = run_steps(make_backend(1, INT8), torch.float32, layers, steps=of_all_rounded)
    exact = run_steps(TorchPaged(), torch.float32, layers, steps=of_all_rounded)
    torch.testing.assert_close(whole[-128:], exact[-128:], rtol=1e-5, atol=1e-6)  # a whole prompt of two tokens


@KV_DTYPES
@pytest.mark.parametrize(("window", "cap"), [pytest.param(None, None, marks=pytest.mark.slow), (600, 3.0)])
def test_shares_of_long_decodes_are_joined(kv_dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    assert_agrees(
        kv_dtype, num_processors=8, layers=[LayerShape(4, 2, 16, 16)] * 2, window=window, cap=cap, steps=LONG_DECODES
    )


@KV_DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (16, 128), (4, 256)])
@pytest.mark.nightly
def test_heads_of_the_sizes_of_real_models(kv_dtype: torch.dtype, heads: int, dim: int) -> None:
    dtype = torch.bfloat16 if HAVE_GPU else torch.float16
    steps = [([(1, 700), (1, 65), (130, 200)], 0)]
    assert_agrees(kv_dtype, dtype, num_processors=8, layers=[LayerShape(heads, 2, dim, dim)], steps=steps)


@pytest.mark.parametrize(("kv_dtype", "most"), [(INT8, 0.01), (E4M3, 0.06)], ids=["int8", "e4m3"])
def test_attention_is_near_that_over_exact_numbers(kv_dtype: torch.dtype, most: float) -> None:
    exact = run_steps(TorchPaged(), torch.float32)
    error = (run_steps(make_backend(1, kv_dtype), torch.float32) - exact).abs().mean() / exact.abs().mean()
    assert 0 < error < most


@WRITTEN
def test_a_vector_of_any_magnitude_is_held_and_zeros_are_zeros(kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = torch.randn(5, 2, 20, device=DEVICE) * torch.tensor([1e-20, 0, 1, 6e4, 1e30], device=DEVICE)[:, None, None]
    cache = SlotCache.allocate(6, 2, 20, kv_dtype, DEVICE)
    store(source, cache, torch.tensor([2, 5, 0, 1, -1], device=DEVICE))
    assert cache.scales is not None
    torch.testing.assert_close(cache.scales[:, [2, 5, 0, 1]].t(), source[:4].abs().amax(-1))
    torch.testing.assert_close(held(cache)[[2, 5, 0, 1]], rounded(source[:4], kv_dtype))
    assert not cache.numbers[[3, 4]].float().any(), "not written"
    assert not cache.scales[:, [3, 4]].any()


@WRITTEN
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim", "rotary"), [(4, 2, 16, 16), (7, 1, 20, 8)])
def test_heads_are_written_as_they_are_rounded_from_float32(
    kv_dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, rotary: int, has_norms: bool
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, num_heads + 2 * num_kv_heads, dim, device=DEVICE)
    rotation = torch.randn(2, 1, 3, rotary, device=DEVICE).unbind()
    norms = HeadNorms(*torch.randn(2, dim, device=DEVICE).unbind(), 0.1, 0.0) if has_norms else None
    slots = torch.tensor([4, -1, 0], device=DEVICE)

    exact_keys = qkv.new_zeros(3, num_kv_heads, dim)

    def written(dtype: torch.dtype) -> tuple[torch.Tensor, tuple[SlotCache, ...]]:
        caches = (
            SlotCache.allocate(6, num_kv_heads, dim, dtype, DEVICE),
            SlotCache.allocate(6, num_kv_heads, dim, dtype, DEVICE),
        )
        return prepare_heads(qkv, rotation, norms, caches, slots, exact_keys if dtype == kv_dtype else None), caches

    (query, caches), (exact_query, exact) = written(kv_dtype), written(torch.float32)
    assert torch.equal(query, exact_query)
    assert torch.equal(exact_keys[[0, 2]], exact[0].numbers[[4, 0]])
    assert exact_keys[1].any(), "also of a token that is not in the cache"
    for cache, source in zip(caches, exact, strict=True):
        torch.testing.assert_close(held(cache), rounded(source.numbers, kv_dtype))
        assert cache.scales is not None
        assert not cache.scales[:, [1, 2, 3, 5]].any(), "not written"


@KV_DTYPES
def test_block_bytes_are_what_numbers_and_scales_take(kv_dtype: torch.dtype) -> None:
    backend = TritonPaged(1, kv_dtype)
    backend.allocate(LAYERS, 7, 16, torch.bfloat16, DEVICE)
    tensors = [t for index in range(len(LAYERS)) for c in backend.caches(index) for t in (c.numbers, c.scales)]
    assert backend.block_bytes(LAYERS, 16, torch.bfloat16) * 7 == sum(t.nbytes for t in tensors if t is not None)
    wide = [LayerShape(32, 8, 128, 128)]
    of_16_bits = TritonPaged(1).block_bytes(wide, 16, torch.bfloat16)
    assert of_16_bits / backend.block_bytes(wide, 16, torch.bfloat16) == pytest.approx(2 * 128 / (128 + 4))


@pytest.mark.parametrize(
    ("backend", "device", "capability", "kv_cache_dtype", "words"),
    [
        (
            "auto",
            "cpu",
            None,
            "int8",
            "is for the Triton kernels on CUDA.*the device is cpu; use `kv_cache_dtype: auto`",
        ),
        ("torch", "cuda", None, "fp8", "`attention_backend: torch` is set; use `kv_cache_dtype: auto`"),
        ("auto", "cuda", (8, 6), "fp8", "8.9 or newer .*, and this one has 8.6; use `kv_cache_dtype: int8`"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(
    backend: AttentionBackendName,
    device: str,
    capability: tuple[int, int] | None,
    kv_cache_dtype: KVCacheDtype,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(ConfigError, match=words):
        select_backend(backend, torch.device(device), torch.bfloat16, 16, kv_cache_dtype)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "kv_dtype", "capability"),
    [("auto", torch.bfloat16, (8, 0)), ("int8", INT8, (8, 0)), ("fp8", E4M3, (8, 9))],
)
def test_the_setting_chooses_the_type(
    kv_cache_dtype: KVCacheDtype, kv_dtype: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    backend = select_backend("auto", CUDA, torch.bfloat16, 16, kv_cache_dtype)
    assert isinstance(backend, TritonPaged)
    assert backend.block_bytes([LayerShape(1, 1, 64, 64)], 1, torch.bfloat16) == 128 * kv_dtype.itemsize + (
        0 if kv_cache_dtype == "auto" else 8
    )


@pytest.mark.nightly  # takes 80 s
def test_an_engine_with_int8_chooses_nearly_every_token_that_transformers_chooses(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare each of 60 tokens after transformers' own earlier tokens, and three answers that continue by themselves.

    The engine chooses 59 of the 60 tokens, and 119 of 120 with all six prompts. The model is random, so rounding
    changes tokens more easily than in a trained model.
    """
    ref = reference("qwen3")
    monkeypatch.setattr(execution.kernels, "why_missing", lambda device: None)
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    params: list[object] = []

    def select(*settings: object) -> TritonPaged:
        params.append(settings[-1])
        return TritonPaged(16, INT8)

    monkeypatch.setattr(runner, "select_backend", select)
    core = ref.make_core(
        attention_backend="auto", device=DEVICE.type, max_num_batched_tokens=128, kv_cache_dtype="int8"
    )
    assert params == ["int8"]
    for number in range(3):
        whole = ref.prompts[number] + ref.answers[number]
        add(core, f"scored {number}", whole[:-1], max_tokens=1, prompt_logprobs=1, logprobs=1)
        add(core, str(number), ref.prompts[number], max_tokens=3)
    outputs = run(core)
    same = 0
    for number in range(3):
        scored = outputs[f"scored {number}"]
        entries = [entry for output in scored for entry in output.prompt_logprobs or []][len(ref.prompts[number]) - 1 :]
        entries += [entry for output in scored for entry in output.logprobs or []]
        best = [entry.top_token_ids[0] for entry in entries]
        same += sum(ours == theirs for ours, theirs in zip(best, ref.answers[number], strict=True))
        answer = [token for output in outputs[str(number)] for token in output.new_token_ids]
        assert answer == ref.answers[number][:3]
    assert 58 <= same <= 60
