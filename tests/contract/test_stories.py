"""Tests which tests in e2e/ run together, as pytest collects them. Some of them remove what others need."""

import os
import subprocess
import sys

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
