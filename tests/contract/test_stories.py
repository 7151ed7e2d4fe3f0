"""Tests which tests in e2e/ run together, as pytest collects them. Some of them remove what others need."""

import os
import subprocess
import sys
from functools import cache

import pytest

from e2e.cluster.paths import REPOSITORY


@cache
def collect(*options: str) -> list[str]:
    """Return the names of the tests that `make e2e` runs with these options."""
    command = [sys.executable, "-m", "pytest", "-c", "e2e/pytest.ini", "--collect-only", "-q", *options, "e2e"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_the_story_that_uninstalls_is_the_last_one_and_none_takes_the_cluster_away() -> None:
    stories = collect()
    assert len(stories) > 20
    assert "test_after_a_crash_down_leaves_nothing" not in stories
    beside, alone = collect("-m", "not alone"), collect("-m", "alone")
    assert sorted(beside + alone) == sorted(stories)
    assert "test_one_gateway_killed_fails_at_most_its_own_requests" in alone
    assert alone[-1] == "test_uninstall_leaves_no_trace_but_the_services_and_the_chart_comes_back"


@pytest.mark.slow
def test_the_crash_of_the_cluster_runs_by_itself() -> None:
    assert collect("-m", "takes_the_cluster_away") == ["test_after_a_crash_down_leaves_nothing"]


@pytest.mark.slow
def test_the_options_of_the_pytest_around_it_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-v -k no_such_story")
    collect.cache_clear()
    assert collect("-m", "takes_the_cluster_away")
