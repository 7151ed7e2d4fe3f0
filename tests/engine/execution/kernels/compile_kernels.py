"""Compiles every Triton kernel that layers and the sampler launch, for GPUs that are absent, with the launches' own
arguments.

It is a program of its own, because a process with Triton's interpreter cannot compile. The layers run on tensors
without numbers. Each launch passes through Triton's own launcher until the GPU would begin. So types, alignment,
constants and options are always those of a real launch. Triton's cache keeps the compiled kernels. `python -m
tests.engine.execution.kernels.compile_kernels` prints the table; with `FILE CAPABILITY ...` it writes the table to a
file, and with `few` at the end only the kernels of FEW_LAYERS. For GPUs with little shared memory it also compiles
attention in float32, which needs the most.
"""

import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from tests.engine.execution.kernels.compiled import (
    CAPABILITIES,
    FEW_LAYERS,
    HEADER,
    OTHER_ROWS,
    OTHER_TOKENS,
    SMALL_CAPABILITIES,
    Compiled,
)
from tests.engine.execution.kernels.cuda_layers import (
    LATENTS,
    PACKED,
    SHAPES,
    STEPS,
    WITH_IMAGES,
    prepare,
    prepare_attention,
    prepare_cuts,
    prepare_experts,
    prepare_product,
    prepare_sampling,
    prepare_uniforms,
)
from tests.engine.execution.kernels.cuda_mixers import FEW_MIXERS, MIXERS, OF_MIXERS, prepare_mixer
from torch._subclasses.fake_tensor import FakeTensorMode

from conveyor_bench.gpu import absent_gpu

EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # types of the KV cache; e4m3 needs 8.9 or newer


def compile_all(capabilities: Iterable[int] = CAPABILITIES, *, few: bool = False) -> list[Compiled]:
    found: dict[tuple[int, int], Compiled] = {}
    place: tuple[str, str, int] = ("", "", 0)

    def add(kernel: Any) -> None:
        found.setdefault((id(kernel), place[2]), _describe(kernel, *place))

    with absent_gpu.compile_only(add):
        for capability in capabilities:
            absent_gpu.use(capability)
            for layer, shape in SHAPES.items():
                if few and layer not in FEW_LAYERS:
                    continue
                for step in STEPS:
                    place = (layer, step, capability)
                    with FakeTensorMode(), torch.inference_mode():
                        prepare(shape, STEPS[step])()
                        prepare_attention(shape, STEPS[step])()
                        for kv_name, kv_dtype in EIGHT_BITS.items():
                            if kv_dtype == torch.int8 or capability >= 89:
                                place = (layer, f"{step}, {kv_name}", capability)
                                prepare(shape, STEPS[step], kv_dtype=kv_dtype)()
                                prepare_attention(shape, STEPS[step], kv_dtype=kv_dtype)()
                        if capability == SMALL_CAPABILITIES[0]:
                            place = (layer, f"{step}, float32", capability)
                            prepare_attention(shape, STEPS[step], torch.float32)()
            for layer, shape in LATENTS.items():
                if few and layer not in FEW_LAYERS:
                    continue
                for step in STEPS:
                    for kv_name, kv_dtype in ({"bfloat16": None} | EIGHT_BITS).items():
                        if kv_dtype in (None, torch.int8) or capability >= 89:
                            place = (layer, f"{step}, {kv_name}", capability)
                            with FakeTensorMode(), torch.inference_mode():
                                prepare_attention(shape, STEPS[step], kv_dtype=kv_dtype)()
                    if capability == SMALL_CAPABILITIES[0]:
                        place = (layer, f"{step}, float32", capability)
                        with FakeTensorMode(), torch.inference_mode():
                            prepare_attention(shape, STEPS[step], torch.float32)()
            of_images = SHAPES["Gemma-2-2B"]
            for kv_name, kv_dtype in ({"bfloat16": None} | EIGHT_BITS).items():
                if kv_dtype in (None, torch.int8) or capability >= 89:
                    place = ("Gemma-2-2B", f"images, a chunk of a prompt, {kv_name}", capability)
                    with FakeTensorMode(), torch.inference_mode():
                        prepare_attention(of_images, WITH_IMAGES, kv_dtype=kv_dtype)()
            for name, packed in PACKED.items():
                for step in STEPS:
                    place = ("Llama-3.2-1B", f"{step}, {name}", capability)
                    with FakeTensorMode(), torch.inference_mode():
                        prepare(SHAPES["Llama-3.2-1B"], STEPS[step], packed=packed)()
                for rows in (16, 32, *OTHER_ROWS):
                    place = ("product", f"{rows} rows, {name}", capability)
                    with FakeTensorMode(), torch.inference_mode():
                        prepare_product(packed, rows)()
                for tokens in (1, 1024, *OTHER_TOKENS):
                    place = ("experts", f"{tokens} tokens, {name}", capability)
                    with FakeTensorMode(), torch.inference_mode():
                        prepare_experts(packed, tokens)()
            for name in FEW_MIXERS if few else MIXERS:
                for step, of_mixers in OF_MIXERS.items():
                    place = (name, step, capability)
                    with FakeTensorMode(), torch.inference_mode():
                        prepare_mixer(name, of_mixers)()
                    if capability == SMALL_CAPABILITIES[0]:  # for the trial at the start
                        place = (name, f"{step}, float32", capability)
                        with FakeTensorMode(), torch.inference_mode():
                            prepare_mixer(name, of_mixers, torch.float32)()
            place = ("sampler", "draws", capability)
            with FakeTensorMode(), torch.inference_mode():
                prepare_uniforms(64)()
                prepare_sampling(64)()
                prepare_cuts(64)()
            place = ("sampler", "draws from float32", capability)  # the type that processors return
            with FakeTensorMode(), torch.inference_mode():
                prepare_cuts(64, torch.float32)()
    return list(found.values())


def _describe(kernel: Any, layer: str, step: str, capability: int) -> Compiled:
    usage = _resource_usage(kernel.asm["cubin"])
    return Compiled(
        name=kernel.metadata.name,
        layer=layer,
        step=step,
        capability=capability,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the resources that the binary itself declares."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        output = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output.stdout)}


def main() -> None:
    if len(sys.argv) == 1:
        print(HEADER, *compile_all(), sep="\n")
        return
    few = sys.argv[-1] == "few"
    compiled = compile_all(map(int, sys.argv[2 : -1 if few else None]), few=few)
    Path(sys.argv[1]).write_bytes(pickle.dumps([vars(kernel) for kernel in compiled]))


if __name__ == "__main__":
    main()
