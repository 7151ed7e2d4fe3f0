"""Provides the fixture that runs a test with each instruction set of the compiled kernels that this CPU has."""

from collections.abc import Iterator

import pytest

from conveyor_engine.execution import native


@pytest.fixture(params=["generic", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native.isa()
    if not native.use_isa(request.param):
        pytest.skip(f"this CPU or this build has no {request.param}")
    yield
    native.use_isa(before)
