"""Triton kernels for CUDA. They know tensors, not engines. `why_missing` says whether they can be used.
Nothing but the other modules of this room imports Triton, which not every machine has.

No autotuning: each kernel's shape comes from a static table, so that start-up is short and every run computes alike.
Without a GPU they run under TRITON_INTERPRET=1 (set before triton is imported) in float32 and float16; the
interpreter computes bfloat16 wrongly.
"""

import importlib.util

import torch


def why_missing(device: torch.device) -> str | None:
    """Why they cannot run there, in a clause; None if they can."""
    if device.type != "cuda":
        return f"it runs on CUDA, and the device is {device.type}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"
