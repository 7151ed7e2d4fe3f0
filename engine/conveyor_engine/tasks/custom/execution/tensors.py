"""Converts tensors of requests to torch's and back. Used by `batches`."""

from typing import Any, Final

import torch

from conveyor_engine.wire.tensors import Datatype, Tensor

DATATYPES: Final[dict[torch.dtype, Datatype]] = {
    torch.bool: "BOOL", torch.uint8: "UINT8", torch.uint16: "UINT16", torch.uint32: "UINT32", torch.uint64: "UINT64",
    torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32", torch.int64: "INT64", torch.float16: "FP16",
    torch.bfloat16: "BF16", torch.float32: "FP32", torch.float64: "FP64",
}  # fmt: skip
DTYPES: Final[dict[str, torch.dtype]] = {datatype: dtype for dtype, datatype in DATATYPES.items()}


def read_tensor(tensor: Tensor) -> torch.Tensor:
    """Convert a tensor of an item to torch's, on the CPU. The datatype is not `BYTES`."""
    dtype = DTYPES[tensor.datatype]
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)


def write_tensor(tensor: torch.Tensor) -> Tensor:
    """Convert torch's tensor, which is on the CPU, to a tensor of an item."""
    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    data = raw.numpy().tobytes() if tensor.numel() else b""
    return Tensor(DATATYPES[tensor.dtype], tuple(tensor.shape), data)
