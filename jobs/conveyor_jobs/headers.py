"""The headers of a job's requests, with a key that may be renewed while the job runs. Used by `job`.

The kubelet renews the token of a ServiceAccount about every hour, and people rotate keys. So the file is followed.
"""

from conveyor_jobs.input_file import InputError
from conveyor_jobs.settings import Settings
from conveyor_process.followed_files import FollowedFiles
from conveyor_protocol.request_headers import CLASS_HEADER


class Headers:
    """The headers, in `values`. Raises InputError for a file that has no key."""

    def __init__(self, settings: Settings) -> None:
        self.values = {"Content-Type": "application/json", "User-Agent": "conveyor-jobs"}
        if settings.request_class:
            self.values[CLASS_HEADER] = settings.request_class
        self._file = settings.api_key_file
        self._files: FollowedFiles | None = None
        if self._file is not None:
            try:
                self._files = FollowedFiles("api_key", (self._file,), self._load)
            except OSError as error:
                raise InputError(str(error)) from error

    async def follow(self) -> None:
        """Use each new key of the file, until cancelled. Returns at once without a file."""
        if self._files is not None:
            await self._files.follow()

    def _load(self) -> None:
        """Read the key. Raises OSError."""
        assert self._file is not None
        key = self._file.read_bytes().strip()
        if not key or not key.isascii() or not key.decode("ascii").isprintable():
            raise OSError(f"{self._file} must contain a key: one line of printable ASCII characters")
        self.values["Authorization"] = f"Bearer {key.decode('ascii')}"
