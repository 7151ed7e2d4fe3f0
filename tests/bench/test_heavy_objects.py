"""Objects that are deep and wide, by docs/benchmarks.md's command."""

import pytest
from tests.bench.commands import run


@pytest.mark.slow
def test_its_objects_are_taken() -> None:
    assert "2 deep and 4 wide objects" in run("heavy_objects.py", "--deep 2 --wide 2 --fill 0.001")
