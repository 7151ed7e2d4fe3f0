"""Checks the memory of weights and caches: it is zero, and in huge pages if it fills one."""

from pathlib import Path

import pytest
import torch

from conveyor_engine.execution.native import library

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_mappings() -> list[range]:
    """Return the addresses of this process that ask for huge pages."""
    found, addresses = list[range](), range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            addresses = range(*(int(part, 16) for part in first.split("-")))
        elif first == "VmFlags:" and "hg" in others:
            found.append(addresses)
    return found


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (3, 1024, 1024)], ids=str)
def test_all_of_it_is_zero_and_can_be_written(shape: tuple[int, ...]) -> None:
    tensor = library.zeros(shape, torch.bfloat16)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert bool(tensor.fill_(1).all())


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no transparent huge pages")
def test_memory_that_fills_a_huge_page_requests_huge_pages() -> None:
    large = library.zeros((2048, 1024), torch.bfloat16)
    middle = large.data_ptr() + large.nbytes // 2
    before = huge_mappings()
    assert any(middle in addresses for addresses in before)
    library.zeros((8, 8), torch.bfloat16)
    assert huge_mappings() == before
