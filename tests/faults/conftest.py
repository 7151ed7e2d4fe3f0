"""Runs one stand for all faults. Their table is printed at the end and written to build/faults.json."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.faults.stand import Cost, Stand, running

_RESULTS = Path("build/faults.json")


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with running(tmp_path_factory.mktemp("stand")) as stand:
        yield stand


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Iterator[Callable[[str, Cost], None]]:
    costs: dict[str, Cost] = {}
    yield costs.__setitem__
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1) + "\n")
    lines = ["", "| fault | seconds | right after | calls | requests answered |", "| --- | --- | --- | --- | --- |"]
    for name, cost in costs.items():
        times = f"{cost.seconds:.0f} | {cost.right_after_seconds:.1f} s"
        lines.append(f"| {name} | {times} | {cost.calls} | {cost.answered}, none failed |")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n".join(lines))
