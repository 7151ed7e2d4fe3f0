"""The commands of docs/benchmarks.md still run, on a little of everything; what they measure here says nothing.

The engine's is in tests/engine/bench/test_bench.py.
"""

import json
import re
import subprocess

import pytest

from e2e.cluster.paths import REPOSITORY

COMMANDS = re.findall(r"```sh\n(.*)\n```", (REPOSITORY / "docs/benchmarks.md").read_text())


def run(program: str, sizes: str) -> str:
    """What that command of the page prints; 1 is the status of a figure that misses its bar, as it may here."""
    (command,) = [command for command in COMMANDS if f"bench/{program}" in command]
    done = subprocess.run(f"{command} {sizes}", shell=True, cwd=REPOSITORY, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_gateway_s_loses_nothing() -> None:
    sizes = "--seconds 1 --requests-per-second 10 --streams 5 --events 5 --concurrency 2"
    result = json.loads(run("gateway.py", sizes).splitlines()[-1])
    assert result["streams"]["gateway"]["lost"] == 0


@pytest.mark.slow
def test_a_hostile_client_of_an_engine_is_measured() -> None:
    assert json.loads(run("hostile_engine.py", "nested --times 1 --seconds 1").splitlines()[-1])


@pytest.mark.slow
def test_hostile_clients_of_a_gateway_are_measured() -> None:
    assert "idle" in run("hostile.py", "idle --seconds 1")


@pytest.mark.slow
def test_heavy_objects_are_measured() -> None:
    assert "2 deep and 2 wide objects" in run("heavy_objects.py", "--deep 2 --wide 2")


def test_the_operator_s_can_start() -> None:
    """No more: with two services it takes half a minute already. Its figures are taken by hand."""
    assert "--services" in run("reconcile.py", "--help")
