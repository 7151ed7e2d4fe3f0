"""Tests which folders of earlier runs a new run removes."""

import fcntl
import os
import threading
from pathlib import Path

from conveyor_local.places import open_places


def test_folders_of_ended_runs_are_removed_however_far_they_came(tmp_path: Path) -> None:
    runs = tmp_path / "run"
    for name, files in (("1", ["lock", "gateway.log"]), ("2", []), (".3", ["lock"]), ("4", ["lock"])):
        (runs / name).mkdir(parents=True)
        for file in files:
            (runs / name / file).touch()
    with (runs / "4" / "lock").open() as lives:
        fcntl.flock(lives, fcntl.LOCK_EX)
        places = open_places(tmp_path, {})
    assert {folder.name for folder in runs.iterdir()} == {"4", str(os.getpid())}
    places.lock.close()


def test_a_run_begins_when_no_other_run_is_beginning(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    other = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    begins = threading.Thread(target=lambda: open_places(tmp_path, {}).lock.close())
    begins.start()
    begins.join(0.2)
    assert not list((tmp_path / "run").iterdir())
    os.close(other)
    begins.join()
    assert list((tmp_path / "run").iterdir())
