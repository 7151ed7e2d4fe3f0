"""Compares the Triton kernels with the backend in plain torch, on a GPU or otherwise in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engine.execution.attention.test_cpu_native import IMAGES, LAYERS, make_metadata
from tests.engine.execution.interpreter import DEVICE, HAVE_GPU, ON_DEVICE, TOLERANCE, in_types
from tests.engine.references import Reference, add, run, tokens_of
from tests.engine.tiny_models import save_tiny_model
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from conveyor_engine import execution
from conveyor_engine.config.engine_config import AttentionBackendName, EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionBackend, AttentionSpec, Ends, LayerShape
from conveyor_engine.execution.attention.select import select_backend
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels import decode_plan, elementwise, few_rows, heads, kv_store, sample, uniform
from conveyor_engine.execution.kernels import paged_attention as kernels
from conveyor_engine.execution.kernels.attention_tiles import choose_tile
from conveyor_engine.execution.kernels.kv_store import store
from conveyor_engine.execution.kernels.slot_cache import SlotCache
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution import runner
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

pytestmark = ON_DEVICE
STEPS = [([(5, 5), (40, 40)], 0), ([(1, 6), (20, 60)], 3), ([(1, 7), (1, 61)], 2)]


def run_steps(
    backend: AttentionBackend,
    dtype: torch.dtype,
    layers: list[LayerShape] = LAYERS,
    window: int | None = None,
    cap: float | None = None,
    has_sinks: bool = False,
    steps: list[tuple[list[tuple[int, int]], int]] = STEPS,
    images: tuple[tuple[int, int], ...] = (),
) -> torch.Tensor:
    """Return all outputs of these steps, in every layer, in one tensor."""
    backend.allocate(layers, 256, 16, dtype, DEVICE)
    outputs = []
    generator = torch.Generator().manual_seed(0)
    for lengths, padding in steps:
        metadata = make_metadata(lengths, padding, images)
        if metadata.ends is not None:
            metadata.set_ends(Ends(metadata.ends.of_tokens.to(DEVICE), in_full_layers=True))
        for name in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping"):
            setattr(metadata, name, getattr(metadata, name).to(DEVICE))
        for index, layer in enumerate(layers):
            heads = layer.num_heads + 2 * layer.num_kv_heads
            shape = (metadata.num_tokens + padding, heads, max(layer.head_dim, layer.value_dim) + 3)
            packed = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)  # slices of it have irregular strides
            query, key, value = packed.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
            key, value = key[..., : layer.head_dim], value[..., : layer.value_dim]
            value = key[..., : layer.value_dim] if layer.values_are_keys else value
            backend.write_kv(index, key, value, metadata)
            sinks = torch.linspace(-2, 3, layer.num_heads).to(dtype).to(DEVICE) if has_sinks else None
            spec = AttentionSpec(index, 0.4, window, cap, sinks=sinks, values_are_keys=layer.values_are_keys)
            out = backend.attend(spec, query[..., : layer.head_dim], metadata, (key, value))
            outputs.append(out[: metadata.num_tokens].flatten().double().cpu())
    return torch.cat(outputs)


def assert_agrees(dtype: torch.dtype, num_processors: int = 1, **case: object) -> torch.Tensor:
    expected = run_steps(TorchPaged(), torch.float32 if dtype == torch.float32 else dtype, **case)  # type: ignore[arg-type]
    error = (run_steps(TritonPaged(num_processors), dtype, **case) - expected).abs().max()  # type: ignore[arg-type]
    assert error < TOLERANCE[dtype], f"differ by {error:.1e}"  # NaN fails: it compares false
    return expected


def test_the_kernels_run_in_the_interpreter_or_on_a_gpu() -> None:
    assert HAVE_GPU or knobs.runtime.interpret, "triton was imported before TRITON_INTERPRET was set"


@in_types("window, cap", (None, None), (9, None), (None, 3.0), (20, 2.0))
def test_both_backends_agree(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    assert_agrees(dtype, window=window, cap=cap)


@in_types("window, cap", (None, None), (9, 3.0))
def test_both_agree_on_sinks(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    expected = assert_agrees(dtype, window=window, cap=cap, has_sinks=True)
    without = run_steps(TorchPaged(), dtype, window=window, cap=cap)
    assert (expected - without).abs().max() > 0.1


@in_types("window, cap", (None, None), (9, None), (20, 3.0))
def test_both_agree_on_images_whose_tokens_see_each_other(
    dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    expected = assert_agrees(dtype, window=window, cap=cap, images=IMAGES)
    causal = run_steps(TorchPaged(), dtype, window=window, cap=cap)
    assert (expected - causal).abs().max() > 0.1


OTHER_GROUPS = [pytest.param(4, 4, marks=pytest.mark.slow), pytest.param(12, 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (20, 1), *OTHER_GROUPS], ids=str)
def test_groups_of_query_heads_of_any_size_fit_the_tile(heads: int, kv_heads: int) -> None:
    assert_agrees(torch.float32, layers=[LayerShape(heads, kv_heads, 20, 20)])


def test_many_sequences_of_all_lengths_find_their_tiles() -> None:
    lengths = [(1, 3), (1, 17), (1, 1), (9, 9), (33, 40), (2, 2), (70, 70), (17, 19), (64, 64)]
    assert_agrees(torch.float32, layers=[LayerShape(2, 1, 16, 16)], steps=[(lengths, 5)])


@in_types("window, cap", (None, None), (600, 3.0))
def test_long_decodes_are_split_and_joined(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    """Use two layers, so that the second one starts with the counters that the first one left."""
    steps: list[tuple[list[tuple[int, int]], int]] = [([(1, 1300), (1, 5), (1, 300)], 0)]
    layers = [LayerShape(4, 2, 16, 16)] * 2
    assert_agrees(dtype, num_processors=8, layers=layers, window=window, cap=cap, steps=steps)


LATENTS = [LayerShape(heads, 1, 24, 16, values_are_keys=True) for heads in (4, 20)]


@in_types("layers", (LATENTS,), ([LayerShape(33, 1, 80, 64, values_are_keys=True)],))
def test_both_agree_on_values_that_are_the_first_numbers_of_their_keys(
    dtype: torch.dtype, layers: list[LayerShape]
) -> None:
    assert_agrees(dtype, layers=layers)


@pytest.mark.parametrize("heads", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_long_decodes_over_latents_are_split_and_joined(heads: int) -> None:
    steps: list[tuple[list[tuple[int, int]], int]] = [([(1, 1300), (1, 5), (1, 300)], 0)]
    layers = [LayerShape(heads, 1, 24, 16, values_are_keys=True)] * 2
    assert_agrees(torch.float32, num_processors=8, layers=layers, steps=steps)


def test_only_the_first_share_of_a_decode_has_the_sink() -> None:
    steps: list[tuple[list[tuple[int, int]], int]] = [([(1, 1300), (1, 5), (1, 300)], 0)]
    layers = [LayerShape(4, 2, 16, 16)] * 2
    assert_agrees(torch.float32, num_processors=8, layers=layers, has_sinks=True, steps=steps)


class Compilations:
    """Records what Triton would compile for a GPU, as (kernel, key) in `seen`, with the keys of its own launcher.

    Without `run`, the kernels do nothing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.run = True
        watched: tuple[tuple[ModuleType, str], ...] = (
            *((kernels, "_attend"), (decode_plan, "_plan_decodes"), (kv_store, "_store")),
            *((elementwise, "_rms_norm"), (elementwise, "_silu_mul"), (heads, "_prepare_heads")),
            *((few_rows, "_multiply_rows"), (uniform, "_hash_rows"), (sample, "_weigh_slices"), (sample, "_choose")),
        )
        for module, name in watched:
            monkeypatch.setattr(module, name, self._watch(name, getattr(module, name)))

    def _watch(self, name: str, kernel: Any) -> Any:
        compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        target = make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(compiled.signature, compiled.params, target)

        class Watched:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **options: Any) -> None:
                    self.seen.add((name, str(bind(*args, **options)[1:])))
                    if self.run:
                        kernel[grid](*args, **options)

                return launch

        return Watched()


# The norm with and without a residual; the products of 1, 2 and 4 rows with a norm, gated, and with a residual.
OURS = ["_prepare_heads", "_rms_norm", "_rms_norm", "_silu_mul", *["_multiply_rows"] * 9]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(("backend", "others"), [("torch", ["_store"]), ("auto", OURS)], ids=["attention", "layers"])
def test_warm_up_compiles_all_that_serving_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: AttentionBackendName, others: list[str]
) -> None:
    monkeypatch.setattr(execution.kernels, "why_missing", lambda device: None)
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    save_tiny_model("llama", tmp_path, num_hidden_layers=2, hidden_size=64)
    monkeypatch.setattr(runner, "select_backend", lambda *_: TritonPaged(num_processors=16))
    compilations = Compilations(monkeypatch)
    config = EngineConfig(
        model=str(tmp_path), device="auto", dtype="float32", attention_backend=backend,
        max_num_seqs=5, max_num_batched_tokens=40, num_kv_blocks=64, prefix_caching=False,
    )  # fmt: skip
    core = EngineCore(config, GenerateRunner(config, open_placement(config)))
    warm = set(compilations.seen)
    sampling = ["_choose", "_hash_rows", "_weigh_slices"]
    assert sorted(name for name, _ in warm) == sorted(["_attend", "_attend", "_plan_decodes", *others, *sampling])
    compilations.run = False
    monkeypatch.setattr(torch, "empty", torch.zeros)  # memory that the kernels do not write then has numbers
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    lengths = [(1, 9), (70, 5), (20, 8), (5, 7), (37, 3), (50, 3), (33, 2)]
    for number, (length, max_tokens) in enumerate(lengths):
        add(
            core,
            str(number),
            list(range(1, 1 + length)),
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=number % 3,
        )
    made = run(core)
    assert [len(tokens_of(made[str(number)])) for number in range(7)] == [max_tokens for _, max_tokens in lengths]
    assert compilations.seen == warm


@pytest.mark.slow
def test_a_model_with_latents_gives_the_tokens_of_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "select_backend", lambda *_: TritonPaged(num_processors=16))
    ref = Reference("minicpm3", tmp_path)
    core = ref.make_core(device="auto")
    assert core.executor.backend.caches(0)[0].numbers.shape[1:] == (1, 24)  # type: ignore[attr-defined]
    for number in (1, 2):
        add(core, str(number), ref.prompts[number], max_tokens=4)
    made = run(core)
    assert [tokens_of(made[str(number)]) for number in (1, 2)] == [ref.answers[number][:4] for number in (1, 2)]


def test_a_tile_is_never_shorter_than_the_hardware_takes_nor_than_a_group() -> None:
    for decode in (True, False):
        for head_dim, item_bytes in ((8, 4), (64, 2), (80, 2), (64, 4), (256, 2), (256, 4)):
            for group in (1, 2, 7, 16, 20):
                tile = choose_tile(decode, head_dim, item_bytes, group)
                assert tile.rows >= max(16, group)
                assert tile.rows.bit_count() == tile.keys.bit_count() == 1
    with pytest.raises(ValueError, match="2048 bytes"):
        choose_tile(True, 512, 4, 1)


def test_a_negative_slot_is_not_written() -> None:
    cache = SlotCache.allocate(4, 2, 3, torch.float32, DEVICE)
    source = torch.ones(3, 2, 3, device=DEVICE)
    store(source, cache, torch.tensor([2, -1, 0], device=DEVICE))
    assert cache.numbers[:, 0, 0].tolist() == [1, 0, 1, 0]


def test_choosing_it_on_a_cpu_gives_the_reason_why_not() -> None:
    with pytest.raises(ConfigError, match="runs on CUDA, and the device is cpu"):
        select_backend("triton", torch.device("cpu"), torch.float32, 16)
