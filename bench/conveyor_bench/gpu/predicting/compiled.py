"""Compiles decode attention for a GPU that is absent, and prints the resources that it needs as a line of JSON.

`python -m conveyor_bench.gpu.predicting.compiled CAPABILITY`. It is a process of its own, because a process with
Triton's interpreter cannot compile. Triton's cache keeps the kernels.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any, Final

import numpy as np
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from conveyor_bench.gpu import absent_gpu
from conveyor_bench.gpu.predicting.constants import QWEN3_06B, DecodeKernel
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, LayerShape
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels import decode_plan

_TYPES: Final = {"bfloat16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_ROWS, _CONTEXT, _BLOCK_SIZE = 64, 512, 16
_CUDA: Final = torch.device("cuda")


def compile_decodes(capability: int) -> dict[str, DecodeKernel]:
    """Return today's decode attention over each type of the KV cache. Raises CalledProcessError."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, str(capability)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name: DecodeKernel(**values) for name, values in json.loads(output).items()}


def _compile(kv_dtype: torch.dtype | None) -> Any:
    """Return the attention kernel that a step of decodes launches."""
    kernels: list[Any] = []
    shape = QWEN3_06B
    with absent_gpu.compile_only(kernels.append), FakeTensorMode(), torch.inference_mode():
        backend = TritonPaged(132, kv_dtype)
        heads = LayerShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
        backend.allocate([heads], 1024, _BLOCK_SIZE, torch.bfloat16, _CUDA)
        starts = np.arange(_ROWS + 1, dtype=np.int32)
        metadata = AttentionMetadata(
            query_start_loc=torch.empty(_ROWS + 1, dtype=torch.int32, device=_CUDA),
            seq_lens=torch.empty(_ROWS, dtype=torch.int32, device=_CUDA),
            block_tables=torch.empty((_ROWS, _CONTEXT // _BLOCK_SIZE), dtype=torch.int32, device=_CUDA),
            slot_mapping=torch.empty(_ROWS, dtype=torch.int64, device=_CUDA),
            num_seqs=_ROWS,
            num_decodes=_ROWS,
            num_tokens=_ROWS,
            query_start_loc_host=starts,
            seq_lens_host=np.full(_ROWS, _CONTEXT, dtype=np.int32),
        )
        query = torch.empty((_ROWS, shape.heads, shape.head_dim), dtype=torch.bfloat16, device=_CUDA)
        backend.attend(AttentionSpec(0, 1.0, None, None), query, metadata)
    (kernel,) = (each for each in kernels if each.metadata.name == "_attend")
    return kernel


def _count_registers(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    return int(re.findall(r"\bREG:(\d+)", done.stdout)[0])


def main() -> None:
    """Print the resources of the kernels, and how they divide the keys."""
    absent_gpu.use(int(sys.argv[1]))
    found = {}
    for name, kv_dtype in _TYPES.items():
        kernel = _compile(kv_dtype)
        found[name] = {
            "registers": _count_registers(kernel.asm["cubin"]),
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "programs_per_processor": decode_plan._PROGRAMS_PER_PROCESSOR,
            "least_keys": decode_plan.KEYS_PER_PROGRAM,
            "most_shares": decode_plan._MOST_SHARES,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
