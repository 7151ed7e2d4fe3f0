"""The errors of `conveyor_api`.

    ConveyorApiError
    ├── InvalidResource      a resource is not valid; has every problem that was found
    └── UnsupportedSchema    a class has a constraint that a CRD cannot express; defined in `crd`

`InferenceService.parse` and `ServedName.parse` raise InvalidResource. For an InferenceService, the operator reports it
as a condition. The gateway keeps the last valid version.
"""

from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails


class ConveyorApiError(Exception):
    """Root of the errors of `conveyor_api`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a resource: its path (`spec.batching.window`), and a sentence about it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class InvalidResource(ConveyorApiError):
    """The body is not a valid InferenceService or ServedName. `problems` is never empty."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        assert problems, "an invalid resource has at least one problem"
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems

    @classmethod
    def of(cls, error: ValidationError) -> Self:
        """Build the error from every problem that pydantic has found."""
        return cls(tuple(_problem(details) for details in error.errors(include_url=False)))


def _problem(details: ErrorDetails) -> Problem:
    """Convert a pydantic error to a problem, with Kubernetes' paths and words."""
    path = ""
    for part in details["loc"]:
        path += f".{part}" if str(part).isidentifier() else f"[{part}]"
    if field := details.get("ctx", {}).get("field"):
        path += f".{field}"
    message = "unknown field" if details["type"] == "extra_forbidden" else details["msg"]
    return Problem(path.removeprefix(".") or "metadata.name", message)
