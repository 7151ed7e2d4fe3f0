"""In which order the stories of e2e/ run, as pytest collects them: some take away what others need."""

import os
import subprocess
import sys

import pytest

from e2e.cluster.paths import REPOSITORY


def collect(*options: str) -> list[str]:
    """The names of the tests that `make e2e` runs with these options."""
    command = [sys.executable, "-m", "pytest", "-c", "e2e/pytest.ini", "--collect-only", "-q", *options, "e2e"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_the_story_that_uninstalls_is_the_last_one_and_none_takes_the_cluster_away() -> None:
    stories = collect()
    assert len(stories) > 20
    assert stories[-1] == "test_uninstall_leaves_no_dead_apiservice_and_no_stuck_namespace"
    assert "test_after_a_crash_down_leaves_nothing" not in stories


@pytest.mark.slow
def test_what_disturbs_others_runs_apart_from_them() -> None:
    beside, alone = collect("-m", "not disturbs"), collect("-m", "disturbs")
    assert sorted(beside + alone) == sorted(collect())
    assert "test_no_stream_is_cut[drain_the_node]" in alone


@pytest.mark.slow
def test_the_crash_of_the_cluster_runs_by_itself() -> None:
    assert collect("-m", "takes_the_cluster_away") == ["test_after_a_crash_down_leaves_nothing"]


@pytest.mark.slow
def test_the_options_of_the_pytest_around_it_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-v -k no_such_story")
    assert collect("-m", "takes_the_cluster_away")
