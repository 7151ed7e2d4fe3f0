"""Runs docs/measuring.md's command for deep and wide objects."""

import re

import pytest
from tests.bench.commands import run


@pytest.mark.nightly
def test_its_objects_are_taken() -> None:
    told = run("heavy-objects", "--deep 2 --wide 2 --fill 0.01")
    found = re.search(r"2 deep and (\d+) wide objects: 1% of etcd's quota", told)
    assert found is not None, told
    assert int(found[1]) > 2
