"""The folders of a run: the kept cache of models, and the run's own folder with logs and configurations.

The run's folder is locked while the run lives. The next run removes the folders of runs that have ended in any way.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from conveyor_local.errors import RunError

_LOCK: Final = "lock"


def find_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder in which this project keeps what it downloads and builds."""
    given = environment.get("CONVEYOR_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "conveyor"


@dataclass(frozen=True, slots=True)
class Places:
    """`models`: the cache of models. `state`: the run's own folder. `volumes`: the folders of claims, by name."""

    models: Path
    state: Path
    volumes: Mapping[str, Path]
    lock: IO[str]

    def find_volume(self, claim: str) -> Path:
        """Return the folder of a claim. Raises RunError."""
        if claim not in self.volumes:
            raise RunError(f"the claim {claim} is a volume of a cluster; name its folder here: --volume {claim}=DIR")
        return self.volumes[claim]


def open_places(cache: Path, volumes: Mapping[str, Path]) -> Places:
    """Create the folders of this run, and remove those of runs that have ended. Raises RunError."""
    for name, folder in volumes.items():
        if not folder.is_dir():
            raise RunError(f"--volume {name}: there is no folder {folder}")
    models, runs = cache / "models", cache / "run"
    state = runs / str(os.getpid())
    try:
        models.mkdir(parents=True, exist_ok=True)
        runs.mkdir(parents=True, exist_ok=True)
        with _locked(runs):  # a run that begins meanwhile must not find this folder without its lock
            _remove_ended(runs)
            state.mkdir()
            lock = (state / _LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise RunError(f"cannot write to {error.filename or cache}: {error.strerror}", 1) from error
    return Places(models, state, {name: folder.resolve() for name, folder in volumes.items()}, lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _remove_ended(runs: Path) -> None:
    for folder in runs.iterdir():
        try:
            with (folder / _LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except BlockingIOError:  # that run lives
            continue
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
