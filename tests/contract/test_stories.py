"""Tests which tests in e2e/ run together, as pytest collects them. Some of them remove what others need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.paths import REPOSITORY

# The marks that `make e2e` chooses by. One process collects for each of them, because it imports what they use once.
CHOICES = ("", "not alone", "alone", "takes_the_cluster_away")
COLLECT = """
import sys
import pytest

for marks in sys.argv[1:]:
    print("marks:", marks)
    pytest.main(["-c", "e2e/pytest.ini", "--collect-only", "-q", "-m", marks, "e2e"])
"""

STORIES_OF_A_GROUP = """
import pytest

@pytest.mark.xdist_group("chart")
@pytest.mark.parametrize("number", range(4))
def test_story(number, worker_id):
    with open("workers", "a") as file:
        print(worker_id, file=file)
"""


@pytest.fixture(scope="module")
def stories() -> dict[str, list[str]]:
    """The names of the tests that `make e2e` runs with each choice, in their order."""
    # The options of the pytest around this one are not its own.
    around = {**os.environ, "PYTEST_ADDOPTS": "-v -k no_such_story"}
    environment = {name: value for name, value in around.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-c", COLLECT, *CHOICES]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("marks: "):
            names = found[line.removeprefix("marks: ")] = []
        elif "::" in line:
            names.append(line.rpartition("::")[2])
    return found


@pytest.mark.slow
def test_the_story_that_uninstalls_is_the_last_one_and_none_takes_the_cluster_away(
    stories: dict[str, list[str]],
) -> None:
    assert len(stories[""]) > 20
    assert "test_after_a_crash_down_leaves_nothing" not in stories[""]
    beside, alone = stories["not alone"], stories["alone"]
    assert sorted(beside + alone) == sorted(stories[""])
    assert "test_one_gateway_killed_fails_at_most_its_own_requests" in alone
    assert alone[-1] == "test_uninstall_leaves_no_trace_but_the_services_and_the_chart_comes_back"


@pytest.mark.slow
def test_the_crash_of_the_cluster_runs_by_itself(stories: dict[str, list[str]]) -> None:
    assert stories["takes_the_cluster_away"] == ["test_after_a_crash_down_leaves_nothing"]


def test_stories_of_a_group_run_one_by_one(tmp_path: Path) -> None:
    """With versions of pytest and xdist that do not fit together, two stories would upgrade the chart at once."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --dist=loadgroup\n")
    (tmp_path / "test_it.py").write_text(STORIES_OF_A_GROUP)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-n", "2"]
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 4
    assert len(set(workers)) == 1
