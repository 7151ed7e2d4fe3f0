"""Checks the Triton kernels as compiled for their GPUs by `compile_kernels`, without a GPU."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import pytest
from tests.engine.execution.kernels.compiled import (
    CAPABILITIES,
    HEADER,
    OTHER_ROWS,
    OTHER_TOKENS,
    SMALL_CAPABILITIES,
    Compiled,
)
from tests.engine.execution.kernels.ptx import copied_from_loaded_addresses, copies_in_flight, product_loop

ROOT = Path(__file__).parents[4]
KERNELS = {
    *("_rms_norm", "_prepare_heads", "_store", "_plan_decodes", "_attend", "_attend_latents", "_silu_mul"),
    *("_multiply_rows", "_multiply_packed_row", "_multiply_packed", "_join_parts", "_restore"),
    *("_plan_tiles", "_multiply_experts", "_clamped_glu"),
    *("_hash_rows", "_weigh_slices", "_choose", "_cut"),
}
OF_STATES = {
    *("_convolve", "_norm_gated", "_delta_decodes", "_delta_matrices", "_delta_chunks"),
    *("_mamba2_decodes", "_mamba2_chunks"),
}
ATTENTION = {"_attend", "_attend_latents"}
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # the limit for one block
IN_CI = 90
# Triton 3.6 spills two registers in the kernel for cuts on sm_90, and six on sm_120. For prompts over 8 bits it spills
# 40 bytes on sm_80 and 224 on sm_100 (int8, heads of 128).
IS_OLDEST = version("triton").startswith("3.6.")
SPILLED_BYTES_MOST = 8 if IS_OLDEST else 0

pytestmark = pytest.mark.timeout(900)  # for the first run; Triton caches compiled kernels


# Without a cache, Triton takes minutes for all layers of a GPU. CI compiles those of two models for one GPU.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param((IN_CI, "few"), id=f"sm_{IN_CI}, few layers"),
        *(pytest.param((capability,), marks=pytest.mark.nightly, id=f"sm_{capability}") for capability in CAPABILITIES),
    ],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_for(request.param, tmp_path_factory.mktemp("kernels"))


def compile_for(what: Iterable[object], folder: Path) -> list[Compiled]:
    file = folder / "compiled.pickle"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    no_warning = "error:TRITON_DEFAULT_FP_FUSION is unset"
    command = [sys.executable, "-W", no_warning, "-m", "tests.engine.execution.kernels.compile_kernels", str(file)]
    subprocess.run([*command, *map(str, what)], cwd=ROOT, env=environment, check=True)
    kernels = [Compiled(**values) for values in pickle.loads(file.read_bytes())]
    print(HEADER, *kernels, sep="\n")
    return kernels


def test_every_kernel_compiles_for_every_gpu(compiled: list[Compiled]) -> None:
    assert {kernel.name for kernel in compiled} == KERNELS | OF_STATES


def test_no_kernel_spills_registers(compiled: list[Compiled]) -> None:
    assert [str(kernel) for kernel in compiled if kernel.stack_bytes > spilled_most(kernel)] == []


def spilled_most(kernel: Compiled) -> int:
    is_8_bit_prompt = kernel.name == "_attend" and kernel.step.endswith(("prompt, int8", "prompt, fp8"))
    if is_8_bit_prompt and kernel.layer == "gpt-oss-20b" and kernel.capability == 80 and not IS_OLDEST:
        return 8  # it has sinks, which the other layers have not
    return 256 if IS_OLDEST and is_8_bit_prompt and kernel.capability != 90 else SPILLED_BYTES_MOST


def test_8_bits_are_read_in_pairs_and_become_float16_at_once(compiled: list[Compiled]) -> None:
    """A load of single bytes, or a way to bfloat16, would double the instructions of a decode's loop."""
    loops = [product_loop(k.ptx) for k in compiled if k.name in ATTENTION and k.step.endswith(("int8", "fp8"))]
    assert len(loops) >= 2
    for loop in loops:
        assert any(re.search(r"e4m3x2|prmt", line) for line in loop)
        assert [line for line in loop if re.search(r"ld\.shared\S*[bus]8|cvt\S*\.(f32\.f16|bf16)", line)] == []


def above_shared_memory(compiled: list[Compiled]) -> list[str]:
    return [str(k) for k in compiled if k.shared_bytes > SHARED_KIB[k.capability] * 1024]


def test_every_kernel_fits_into_a_blocks_shared_memory(compiled: list[Compiled]) -> None:
    assert above_shared_memory(compiled) == []


@pytest.mark.nightly
def test_every_kernel_fits_into_a_blocks_shared_memory_on_parts_that_have_less(tmp_path: Path) -> None:
    """Checks an A10 (8.6), an L4 or L40S (8.9) and an RTX PRO 6000 (12.0); on the first one also float32."""
    compiled = compile_for(SMALL_CAPABILITIES, tmp_path)
    assert {kernel.capability for kernel in compiled} == set(SMALL_CAPABILITIES)
    assert above_shared_memory(compiled) == []
    spilled_most = 24 if IS_OLDEST else 0
    assert [str(kernel) for kernel in compiled if kernel.name == "_cut" and kernel.stack_bytes > spilled_most] == []
    of_states = [kernel for kernel in compiled if kernel.name in OF_STATES and not kernel.step.endswith("float32")]
    assert of_states
    assert [str(kernel) for kernel in of_states if kernel.stack_bytes] == []
    # CUDA keeps room for what the trial at the start spills, for all threads that fit on the GPU.
    of_trial = [kernel for kernel in compiled if kernel.name in OF_STATES and kernel.step.endswith("float32")]
    assert {kernel.name for kernel in of_trial} == OF_STATES
    assert [str(kernel) for kernel in of_trial if kernel.stack_bytes > (4096 if IS_OLDEST else 1024)] == []


def loops_of_attention(compiled: list[Compiled]) -> dict[str, list[str]]:
    return {str(kernel): product_loop(kernel.ptx) for kernel in compiled if kernel.name in ATTENTION}


def test_keys_and_values_are_copied_while_the_tile_before_them_is_computed_with(compiled: list[Compiled]) -> None:
    """When the loop waits for the two copies of one tile, the two of the next tile are running."""
    loops = loops_of_attention(compiled)
    assert [kernel for kernel, loop in loops.items() if copies_in_flight(loop) < 2] == []
    assert [kernel for kernel, loop in loops.items() if any("ld.global.v" in line for line in loop)] == []


def test_blocks_are_looked_up_an_iteration_before_they_are_copied(compiled: list[Compiled]) -> None:
    loops = loops_of_attention(compiled)
    assert all(any("ld.global.b32" in line for line in loop) for loop in loops.values()), "in the block table"
    assert [kernel for kernel, loop in loops.items() if copied_from_loaded_addresses(loop)] == []


def test_numbers_of_few_bits_are_copied_while_those_before_them_are_multiplied(compiled: list[Compiled]) -> None:
    """Two tiles or more of weights and rows are on their way, and no copy waits for a scale."""
    names = {"_multiply_packed", "_multiply_experts"}
    loops = {str(kernel): product_loop(kernel.ptx) for kernel in compiled if kernel.name in names}
    assert len(loops) >= 12
    assert [kernel for kernel, loop in loops.items() if copies_in_flight(loop) < 4] == []
    assert [kernel for kernel, loop in loops.items() if copied_from_loaded_addresses(loop)] == []


def test_other_numbers_of_rows_compile_no_product_and_no_recurrence_anew(compiled: list[Compiled]) -> None:
    """Otherwise, requests would wait for compilers."""
    steps = (*(f"{rows} rows" for rows in OTHER_ROWS), *(f"{tokens} tokens" for tokens in OTHER_TOKENS), "other")
    assert [str(kernel) for kernel in compiled if kernel.step.startswith(steps)] == []


def test_a_share_is_there_before_it_is_said_to_be_and_read_after_that(compiled: list[Compiled]) -> None:
    """All threads store, one increments the counter, all read the count, and only then they read what others stored.

    For attention of decodes. `.cg`: from the cache that the multiprocessors share.
    """
    order = re.compile(r"bar\.sync|atom\.global\.gpu\.acq_rel|st\.global|ld\.global\.cg")
    decodes = [kernel for kernel in compiled if kernel.name in ATTENTION and "decode" in kernel.step]
    assert decodes
    for kernel in decodes:
        steps = [step for step, _ in groupby(order.findall(kernel.ptx))]
        arrival = steps.index("atom.global.gpu.acq_rel")
        assert steps[arrival - 2 : arrival + 2] == ["st.global", "bar.sync", "atom.global.gpu.acq_rel", "bar.sync"]
        assert "ld.global.cg" in steps[arrival:]
        assert "ld.global.cg" not in steps[:arrival]


def test_a_copy_from_where_a_load_just_said_is_found() -> None:
    load = "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];"
    copy = "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd2 + 0 ], 0x10, %r3;"
    assert copied_from_loaded_addresses([load, "mul.wide.s32 %rd2, %r1, 16;", copy]) == [copy]
    assert copied_from_loaded_addresses(["mul.wide.s32 %rd2, %r1, 16;", load, copy, "mov.b32 %r7, %r1;"]) == []
