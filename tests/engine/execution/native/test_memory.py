"""Checks the memory of weights and caches: it is zero, and in huge pages if it fills one."""

from pathlib import Path

import pytest
import torch

from conveyor_engine.execution.native import library

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> list[str]:
    """Return VmFlags of the mapping that contains the address."""
    inside, flags = False, list[str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            flags = line.split()[1:]
    return flags


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (3, 1024, 1024)], ids=str)
def test_all_of_it_is_zero_and_can_be_written(shape: tuple[int, ...]) -> None:
    tensor = library.zeros(shape, torch.bfloat16)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert bool(tensor.fill_(1).all())


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no transparent huge pages")
def test_what_fills_a_huge_page_asks_for_them() -> None:
    large, small = library.zeros((2048, 1024), torch.bfloat16), library.zeros((8, 8), torch.bfloat16)
    assert "hg" in flags_of(large.data_ptr() + large.nbytes // 2)
    assert "hg" not in flags_of(small.data_ptr())
