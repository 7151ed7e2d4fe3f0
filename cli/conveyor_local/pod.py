"""One engine pod as processes: its downloads, one after another, and then an engine that is kept running.

It does what the kubelet does with the operator's pod template: a container that ends is started again with a growing
pause, and the three probes decide whether the engine is ready and whether it lives. `service` creates and stops pods,
and reads `state`, from which the operator's functions compute conditions.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import aiohttp

from conveyor_api import names
from conveyor_local.processes import ChildProgram, Process
from conveyor_local.templates import Missing, Object
from conveyor_operator.inferenceservice.manifests.pods import ENGINE_CONTAINER
from conveyor_operator.inferenceservice.pods import ContainerState, PodState
from conveyor_operator.inferenceservice.status import format_time

TEMPLATE_LABEL: Final = "1"  # all pods of a run have the same template
_LONGEST_PAUSE_SECONDS: Final = 60.0
_FORGIVEN_SECONDS: Final = 600.0  # an engine that ran this long is started again without a pause
_LOOK_SECONDS: Final = 0.1
_CONFIG_ERROR: Final = "CreateContainerConfigError"
_PORT: Final = re.compile(r'event"?[=:] ?"?listening\b.*?\bport"?[=:] ?"?(\d+)')


@dataclass(frozen=True, slots=True)
class PodPlan:
    """How to run the pods of one service. build: returns the program of a container; raises Missing.

    gpus: the number that an engine gets. grace_seconds: from SIGTERM to SIGKILL.
    """

    namespace: str
    template: Object
    build: Callable[[Object, "Pod"], ChildProgram]
    folder: Path
    grace_seconds: float
    gpus: int
    take_gpus: Callable[[int], list[str] | None]
    give_gpus_back: Callable[[Sequence[str]], None]


class Pod:
    """A pod. on_change: called after each change of `state`."""

    def __init__(self, plan: PodPlan, name: str, http: aiohttp.ClientSession, on_change: Callable[[], None]) -> None:
        self.name = name
        self.uid = str(uuid4())
        self.gpus: list[str] = []
        self.port = 0
        self.fetch_seconds = self.start_seconds = 0.0  # of all downloads; from the engine's start until it was ready
        self._plan = plan
        self._http = http
        self._on_change = on_change
        self._process: Process | None = None
        self._leaving = asyncio.Event()
        spec = plan.template["spec"]
        self._containers = {
            each["name"]: ContainerState(each["name"], initial=each["name"] != ENGINE_CONTAINER)
            for each in (*spec["initContainers"], *spec["containers"])
        }
        self._state = PodState(
            name, self.uid, plan.namespace, template_label=TEMPLATE_LABEL, phase="Pending", created_at=_now()
        )
        self._task = asyncio.create_task(self._run(), name=name)

    @property
    def state(self) -> PodState:
        return replace(self._state, containers=tuple(self._containers.values()))

    @property
    def is_ready(self) -> bool:
        return self._state.ready and not self._state.leaving

    @property
    def is_leaving(self) -> bool:
        return self._state.leaving

    @property
    def restarts(self) -> int:
        return self._containers[ENGINE_CONTAINER].restarts

    @property
    def folder(self) -> Path:
        """The folder of its logs."""
        return self._plan.folder / self.name

    async def stop(self) -> None:
        """Stop as Kubernetes deletes a pod: no new requests, SIGTERM, and SIGKILL after the grace period."""
        self._leaving.set()
        self._change(leaving=True)
        while not self._task.done():
            if self._process is not None:
                await self._process.stop(self._plan.grace_seconds)
            await asyncio.wait((self._task,), timeout=_LOOK_SECONDS)
        self._task.result()

    def kill(self) -> None:
        self._leaving.set()
        if self._process is not None:
            self._process.kill()

    async def _run(self) -> None:
        try:
            await self._wait_for_gpus()
            spec = self._plan.template["spec"]
            for container in (*spec["initContainers"], *spec["containers"]):
                await self._repeat(container)
        finally:
            self._plan.give_gpus_back(self.gpus)

    async def _wait_for_gpus(self) -> None:
        while not self._leaving.is_set():
            found = self._plan.take_gpus(self._plan.gpus)
            if found is not None:
                self.gpus = found
                self._change(unschedulable="", unschedulable_at="", scheduled_at=_now())
                return
            if not self._state.unschedulable:
                message = f"all GPUs of this machine are in use: Insufficient {names.GPU}"
                self._change(unschedulable=message, unschedulable_at=_now())
            await self._pause(1.0)

    async def _repeat(self, container: Object) -> None:
        """Run a container until it has succeeded, an engine until the pod is stopped."""
        failures = 0
        while not self._leaving.is_set():
            began = time.monotonic()
            code = await self._start(container)
            seconds = time.monotonic() - began
            if code == 0 and container["name"] != ENGINE_CONTAINER:
                self.fetch_seconds += seconds
                return
            failures = 1 if seconds > _FORGIVEN_SECONDS else failures + 1
            if failures > 1:
                self._set(container, waiting_reason=self._containers[container["name"]].waiting_reason or "CrashLoop")
                await self._pause(min(2.0 ** (failures - 2), _LONGEST_PAUSE_SECONDS))

    async def _start(self, container: Object) -> int | None:
        """Run a container once. Returns its exit code; None if it cannot start."""
        name: str = container["name"]
        try:
            program = self._plan.build(container, self)
        except Missing as error:
            self._set(container, waiting_reason=_CONFIG_ERROR, waiting_message=str(error))
            return None
        message = self.folder / f"{name}.termination"
        message.unlink(missing_ok=True)
        environment = {**program.environment, names.TERMINATION_LOG_ENV: str(message)}
        self._process = process = await Process.start(
            replace(program, environment=environment), self.folder / f"{name}.log"
        )
        if self._leaving.is_set():
            process.kill()
        began = _now()
        self._set(container, running=True, waiting_reason="", waiting_message="")
        watch = asyncio.create_task(self._watch(process, container))
        code = await process.wait()
        self._process = None
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        self._change(ready=False, ready_at="")
        self._set(
            container, ready=False, running=False, ended=True, started_at=began, ended_at=_now(),
            exit_code=code if code >= 0 else 128 - code,
            restarts=self._containers[name].restarts + (name == ENGINE_CONTAINER),
            ended_reason="Completed" if code == 0 else "Error",
            ended_message=_read(message) or (process.read_last_lines() if code else ""),
        )  # fmt: skip
        return code

    async def _watch(self, process: Process, container: Object) -> None:
        """Probe an engine, and kill one that does not start in time or hangs."""
        if container["name"] != ENGINE_CONTAINER:
            return
        began = time.monotonic()
        startup = container["startupProbe"]
        until = began + startup.get("initialDelaySeconds", 0) + startup["failureThreshold"] * startup["periodSeconds"]
        while not await self._find_started(process, startup):
            if time.monotonic() > until:
                process.kill()
                return
            await asyncio.sleep(_LOOK_SECONDS)
        self.start_seconds = time.monotonic() - began
        self._set(container, ready=True)
        self._change(ready=True, ready_at=_now(), phase="Running")
        await asyncio.gather(
            self._follow(container["readinessProbe"], self._set_ready),
            self._follow(container["livenessProbe"], lambda lives: None if lives else process.kill()),
        )

    async def _find_started(self, process: Process, probe: Object) -> bool:
        listening = _PORT.search(process.read_log())
        if listening is None:
            return False
        self.port = int(listening[1])
        return await self._probe(probe)

    async def _follow(self, probe: Object, on_change: Callable[[bool], None]) -> None:
        """Probe until cancelled. Calls `on_change` after the last allowed failure, and after a later success."""
        failures, was_good = 0, True
        while True:
            await asyncio.sleep(probe["periodSeconds"])
            failures = 0 if await self._probe(probe) else failures + 1
            is_good = failures < probe["failureThreshold"]
            if is_good != was_good:
                on_change(was_good := is_good)

    async def _probe(self, probe: Object) -> bool:
        limit = aiohttp.ClientTimeout(total=probe["timeoutSeconds"])
        url = f"http://127.0.0.1:{self.port}{probe['httpGet']['path']}"
        try:
            async with self._http.get(url, timeout=limit) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _set_ready(self, ready: bool) -> None:
        self._change(ready=ready, ready_at=_now() if ready else "")

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()

    def _set(self, container: Object, **changes: Any) -> None:
        name = container["name"]
        self._containers[name] = replace(self._containers[name], **changes)
        self._on_change()

    def _change(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._on_change()


def _now() -> str:
    return format_time(datetime.now(UTC))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
