"""`python3 -m e2e.cluster.preflight try|demo|vllm|cluster|clients`: checks whether this machine can run it.

make calls this before anything long begins. It lists everything that is missing, one line each. It installs Debian's
packages, so that the steps that then run in parallel need not. Standard library only.
"""

import filecmp
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e import vllm
from e2e.cluster import kind, owners, programs, tools
from e2e.cluster.containerd import Containerd
from e2e.cluster.images import BUILT_FROM
from e2e.cluster.paths import CACHE, REPOSITORY

_GO_OLDEST = (1, 26)
_PYTHON_OLDEST = (3, 11)


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the set-up that is still to be done, with its time on two cores (docs/benchmarks.md) and its disk
    space."""

    name: str
    minutes: float
    gigabytes: float  # kept after the step
    passing: float = 0.0  # additional gigabytes while the step runs
    scales: bool = False  # whether its time depends on the number of cores


PACKAGES = Step("Python's packages", 2, 6)
TRY = Step("Python's packages and the demo's model", 1, 4)
PROGRAMS = Step("Kubernetes' programs", 12, 10, scales=True)
IMAGES = Step("the images", 3, 3, passing=6)
LOADING_INTO_KIND = Step("bringing them to the node", 2, 6, passing=3)  # the local node shares the files of the store
MODEL = Step("the demo's model", 1, 0.1)
DEMO = Step("the cluster and the demo itself", 2, 1)
VLLM = Step("vLLM's image", 17, 13, passing=11)


def check(todo: Iterable[Step], with_images: bool) -> None:
    """Raise `ProgramMissing` with a line for each missing thing. Installs Debian's packages."""
    _refuse(
        *_lacking_for_python(todo),
        *_lacking_for_compiling(),
        *(_lacking_for_kind() if kind.is_requested() else _lacking_for_local()),
    )
    if not kind.is_requested():
        programs.require(*programs.CLUSTER, *(programs.IMAGES if with_images else ()))


def steps(with_vllm: bool = False) -> Iterator[Step]:
    """Yield the steps that `make demo` or `make vllm` still needs on this machine, as far as can be seen."""
    if not (REPOSITORY / ".venv" / ".complete").exists():
        yield PACKAGES
    if not kind.is_requested() and not all(tools.tool_named(name).path.exists() for name in tools.CLUSTER):
        yield PROGRAMS
    if kind.is_requested() or not _images_are_of_today():
        yield IMAGES
    if kind.is_requested():
        yield LOADING_INTO_KIND
    if not (CACHE / "models" / "demo").exists():
        yield MODEL
    yield DEMO
    if with_vllm and not _node_has_vllm():
        yield VLLM


def estimate(todo: list[Step], cores: int) -> str:
    minutes = sum(step.minutes * (2 / cores if step.scales else 1) for step in todo)
    names = ", ".join(step.name for step in todo)
    took = f"about {max(1, round(minutes))} minutes on this machine's {cores} cores"
    return f"This takes {took}, longer where they are busy: {names}."


def most_gigabytes(todo: Iterable[Step]) -> float:
    """Return the maximum of disk space, in gigabytes, that the steps need at a time."""
    kept = worst = 0.0
    for step in todo:
        kept += step.gigabytes
        worst = max(worst, kept + step.passing)
    return worst


def _refuse(*lacking: str) -> None:
    if lacking:
        raise programs.ProgramMissing("\n".join(lacking))


def _lacking_for_python(todo: Iterable[Step]) -> Iterator[str]:
    if sys.version_info < _PYTHON_OLDEST:
        yield f"Python 3.11 or newer is needed; python3 is {sys.version.split()[0]}"
    if importlib.util.find_spec("ensurepip") is None:
        yield "Python's venv is needed; on Debian, as root: apt-get install python3-venv"
    free, needed = shutil.disk_usage(_existing(CACHE)).free / 1e9, most_gigabytes(todo)
    if free < needed:
        yield f"{needed:.0f} GB of disk are needed below {CACHE} (CONVEYOR_CACHE moves it); {free:.0f} are free"


def _lacking_for_compiling() -> Iterator[str]:
    if not any(map(programs.found, ("cc", "gcc", "clang"))):
        yield "a C compiler is needed; on Debian, as root: apt-get install gcc libc6-dev"


def _lacking_for_kind() -> Iterator[str]:
    for program in ("docker", "kind"):
        if programs.found(program) is None:
            yield programs.INSTALLED_BY_PEOPLE[program]


def _lacking_for_local() -> Iterator[str]:
    if os.geteuid() != 0:
        yield "the local cluster needs root: use sudo, or Docker and kind (CLUSTER=kind)"
    yield from owners.describe_others()
    if not all(tools.tool_named(name).path.exists() for name in tools.CLUSTER):
        yield from _lacking_for_go()


def _lacking_for_go() -> Iterator[str]:
    if programs.found("go") is None:
        yield programs.INSTALLED_BY_PEOPLE["go"]
        return
    version = programs.run("go", "env", "GOVERSION", capture_output=True, text=True, cwd="/").stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < _GO_OLDEST:
        yield f"Go 1.26 or newer is needed to build Kubernetes; {programs.found('go')} is {version}"


def _images_are_of_today() -> bool:
    """Return whether at most the project's own code must be built and loaded into the node, which takes seconds."""
    return BUILT_FROM.exists() and filecmp.cmp(BUILT_FROM, REPOSITORY / "uv.lock", shallow=False)


def _node_has_vllm() -> bool:
    """Return whether the running local cluster has the image. A new cluster begins without it."""
    socket = CACHE / "local" / "containerd.sock"
    node = Containerd("ctr", "--address", socket)
    return socket.exists() and node.ready() and node.has_image(vllm.IMAGE)


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def main(target: str, *options: str) -> None:
    if target == "clients":
        programs.require(*programs.CLIENTS)
        return
    if target == "try":
        _refuse(*_lacking_for_python([TRY] if "--packages" in options else []))
        return
    todo = list(steps(with_vllm=target == "vllm"))
    if target != "cluster":
        print(estimate(todo, os.cpu_count() or 1), flush=True)
    check(todo, with_images=target != "cluster")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except programs.ProgramMissing as error:
        sys.exit(str(error))
