"""Triton kernels for CUDA. They know tensors, not engines.

Only the other modules of this package import Triton, because not every machine has it. `why_missing` says whether the
kernels can run.

There is no autotuning. Each kernel takes its tile shape from a static table, which keeps start-up short and results the
same in every run. Without a GPU the kernels run under TRITON_INTERPRET=1 (set before triton is imported) in float32 and
float16. The interpreter computes bfloat16 wrongly.
"""

import importlib.util
import os

import torch

# Triton reads it when it compiles. Unset, 3.9 logs a warning, and 3.10 ends the fusion of multiply and add.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def why_missing(device: torch.device) -> str | None:
    """Return why the kernels cannot run on this device, as a clause for an error message; None if they can."""
    if device.type != "cuda":
        return f"it runs on CUDA, and the device is {device.type}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"
