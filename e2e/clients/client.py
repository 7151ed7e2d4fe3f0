"""A client of the matrix. Used by `matrix` and `scripted`, which list all clients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from e2e.clients import reports

PROGRAMS: Final = Path(__file__).parent / "programs"
Task = Literal["generate", "embed", "rerank", "classify", "compute", "transcribe", "paint", "see", "script"]


@dataclass(frozen=True, slots=True)
class Client:
    """A row of the matrix."""

    name: str  # the client's name, and after a comma what is done with it
    packages: tuple[str, ...]  # those of npm begin with `npm:`; the first is the client itself
    command: tuple[str, ...]
    ran: str  # for people
    judge: Callable[[str, Path], str] = reports.named_checks  # (its output, `{out}`) -> what passed
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None  # where it runs; None: in its environment
    task: Task = "generate"  # of the service that it is tried with
    make: Callable[[], Path] | None = None  # makes and returns its environment; None: `packages` are installed

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2].removeprefix("v")


def python(program: str) -> tuple[str, ...]:
    """Return the command for a program in Python."""
    return ("{env}/bin/python", str(PROGRAMS / program), "{url}", "{model}")
