"""The error of `conveyor run`: one sentence for the user, and an exit code."""


class RunError(Exception):
    """The run cannot begin or go on. `code`: 2 if the files or flags are wrong, otherwise 1."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
