"""Compiles Triton kernels for a GPU that is absent, with the arguments of real launches.

Used by `predicting` and by tests of the kernels. A process with Triton's interpreter cannot compile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from conveyor_engine.execution.kernels import part


class AbsentGpu:
    """The part of a Triton driver that its launcher uses before a kernel begins."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # the launcher keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Pointer:
    """A substitute for a tensor, without data. The launcher needs only its type, and an address with its alignment."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def compile_only(on_kernel: Callable[[Any], None]) -> Iterator[None]:
    """Make each launch only compile its kernel, and pass the kernel to `on_kernel`. `use` chooses the GPU."""
    launch = JITFunction.run

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        args = tuple(Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        on_kernel(launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_kernel
    try:
        yield
    finally:
        JITFunction.run = launch


def use(capability: int) -> None:
    """Compile for this compute capability from now on: 90 for 9.0."""
    triton.runtime.driver.set_active(AbsentGpu(capability))
    part.capability.cache_clear()
