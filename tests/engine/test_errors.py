"""What an error that nobody expected reports."""

import pytest

from conveyor_engine.errors import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch calls its own, whose text may be anything."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("Allocation on device 0 would exceed allowed memory"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("could not create a memory object"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_an_error_without_memory_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("a sentence about memory"), ValueError("out of memory")], ids=repr)
def test_other_errors_are_not_about_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
