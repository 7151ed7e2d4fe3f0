"""Runs the offline jobs of the files: each `Job` whose program is `conveyor_jobs`. Used by `running`.

The job's flags are those of its manifest, with the folders of its volumes and this gateway's address.
"""

import re
from collections.abc import Iterator
from typing import Any, Final
from uuid import uuid4

from conveyor_api import names
from conveyor_local.errors import RunError
from conveyor_local.plans import Surroundings
from conveyor_local.processes import ChildProgram, Process
from conveyor_local.templates import Missing, PodFields, build_environment, find_folders, find_volume, list_arguments

_DEFAULT_RETRIES: Final = 6  # Kubernetes' own
_LASTING: Final = (0, 2, 3, 4)  # exit codes after which another start would not help
_GATEWAY: Final = re.compile(rf"https?://{names.GATEWAY_SERVICE}[.:][^/\s]*")
_GRACE_SECONDS: Final = 30


class OfflineJob:
    """One job. It is started again after failures that may pass, as often as its manifest says."""

    def __init__(self, key: str, body: dict[str, Any], around: Surroundings) -> None:
        self.key = key
        namespace, _, name = key.partition("/")
        template = body["spec"]["template"]
        (container,) = template["spec"]["containers"]
        self._retries = int(body["spec"].get("backoffLimit", _DEFAULT_RETRIES))
        self._container = container
        self._around = around
        self._fields = PodFields(namespace, f"{name}-1", str(uuid4()))
        self.log = around.places.state / namespace / "jobs" / f"{name}.log"
        self._process: Process | None = None
        self._is_stopping = False
        try:
            self._folders = find_folders(
                template,
                container,
                lambda volume: find_volume(volume, namespace, f"jobs/{name}", around.places, around.objects),
            )
            self._environment = build_environment(
                container, self._fields, self._folders, around.objects, around.inherited
            )
        except (RunError, Missing) as error:
            raise RunError(f"Job {key}: {error}") from error

    async def run(self, root: str) -> int:
        """Run the job to its end. `root`: the gateway's address. Returns its exit code."""
        program = ChildProgram("conveyor_jobs", list(self._list_arguments(root)), self._environment)
        code = 1
        for _ in range(self._retries + 1):
            self._process = await Process.start(program, self.log)
            code = await self._process.wait()
            if code in _LASTING or self._is_stopping:
                break
        return code

    def describe_end(self) -> str:
        """Return the last line of the log."""
        lines = self._process.read_last_lines().splitlines() if self._process else []
        return lines[-1] if lines else "no output"

    async def stop(self) -> None:
        self._is_stopping = True
        if self._process is not None:
            await self._process.stop(_GRACE_SECONDS)

    def kill(self) -> None:
        self._is_stopping = True
        if self._process is not None:
            self._process.kill()

    def _list_arguments(self, root: str) -> Iterator[str]:
        for argument in list_arguments(self._container, self._folders):
            yield _GATEWAY.sub(root, argument)
