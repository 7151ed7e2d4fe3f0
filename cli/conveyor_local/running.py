"""Conducts a run: plans it, opens the gateway, keeps services and jobs running, and ends them. Used by `command`.

The first signal drains as in a cluster: the gateway answers the requests that it has, then each engine gets SIGTERM and
its grace period. A second signal ends everything at once.
"""

import asyncio
import math
import os
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import uuid4

import aiohttp

from conveyor_gateway.server import Server
from conveyor_gateway.settings import Settings
from conveyor_local.asking import ask
from conveyor_local.burst import Burst
from conveyor_local.effects import list_without_effect
from conveyor_local.errors import RunError
from conveyor_local.figures import Figures
from conveyor_local.files import Object, Objects
from conveyor_local.logs import follow_logs
from conveyor_local.machine import check_gpus, find_machine
from conveyor_local.offline import OfflineJob
from conveyor_local.places import open_places
from conveyor_local.plans import Surroundings
from conveyor_local.screen import News, Screen, build_calls
from conveyor_local.service import Options, Service
from conveyor_local.source import LocalSource
from conveyor_operator.inferenceservice.replicas import may_sleep
from conveyor_operator.inferenceservice.status import format_time
from conveyor_process.listening import allow_open_files

_ACTIVITY_SECONDS: Final = 0.5  # as the operator polls
_DEMAND_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of the command."""

    host: str
    port: int
    cache: Path
    volumes: dict[str, Path]
    autoscales: bool
    sync_seconds: float
    question: str
    load: int
    picture: Path
    until_done: bool
    verbose: bool

    @property
    def root(self) -> str:
        """The gateway's address for clients on this machine."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class Run:
    """One run."""

    def __init__(self, objects: Objects, flags: Flags, screen: Screen) -> None:
        """Plan the run, and create its folders. Nothing is started. Raises RunError."""
        self._flags = flags
        self._screen = screen
        self._created_at = format_time(datetime.now(UTC))
        self.places = open_places(flags.cache, flags.volumes)
        self._machine = find_machine(os.environ)
        around = Surroundings(self.places, objects, self._machine, dict(os.environ))
        options = Options(flags.autoscales, flags.sync_seconds, flags.root, screen.report)
        bodies = [self._complete(body) for body in objects.services.values()]
        self._services = [Service(body, around, options) for body in bodies]
        specs = [each.service for each in self._services]
        check_gpus(specs, self._machine)
        most = [each.spec.most_replicas if flags.autoscales else each.spec.first_replicas for each in specs]
        self._machine.engines = max(1, sum(most))
        self._jobs = [OfflineJob(key, body, around) for key, body in objects.jobs.items()]
        self._source = LocalSource(specs, objects.keys.values(), self._created_at)
        self._started = asyncio.Event()
        self._report_plan(bodies, objects)

    def _complete(self, body: Object) -> Object:
        """Return the body with the metadata that the API server sets."""
        metadata = {"uid": str(uuid4()), "generation": 1, "creationTimestamp": self._created_at}
        return {**body, "metadata": {**body["metadata"], **metadata}}

    def _report_plan(self, bodies: list[Object], objects: Objects) -> None:
        report = self._screen.report
        report(f"this machine: {self._machine.describe()}; logs: {self.places.state}")
        for service, body in zip(self._services, bodies, strict=True):
            if (fraction := self._machine.find_kv_fraction(service.service)) is not None:
                report(f"{service.key}: the KV cache of each engine gets {fraction:.0%} of the free memory")
            if found := list_without_effect(body):
                report(f"{service.key}: no effect here: {', '.join(found)}")
        if objects.skipped:
            report(f"skipped, because only a cluster uses them: {', '.join(objects.skipped)}")
        if any(each.scales for each in self._services):
            report(f"the autoscaler decides every {self._flags.sync_seconds:g} s (15 s in a cluster by default)")

    async def go(self) -> int:
        """Run until a signal. Returns the exit code. Raises RunError."""
        stop, end_now = _catch_signals()
        settings = Settings(
            host=self._flags.host,
            port=self._flags.port,
            admin_host="127.0.0.1",
            admin_port=0,
            root_models="All",  # there are no tenants here
            drain_delay_seconds=0,  # nobody else has to stop using this address
        )
        server = Server(settings, allow_open_files(), self._source)
        for service in self._services:
            service.update_gateway(self._source)
        serving = asyncio.create_task(server.run(stop, end_now))
        try:
            await self._wait_open(server, serving)
            async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
                figures = Figures(http, settings.admin_host, server.admin_port)
                return await self._work(http, figures, serving, stop, end_now)
        except ExceptionGroup as group:
            errors = group.subgroup(RunError)
            raise errors.exceptions[0] if errors is not None else group from None
        finally:
            end_now.set()
            stop.set()
            self._kill()
            await asyncio.gather(serving, return_exceptions=True)

    async def _wait_open(self, server: Server, serving: "asyncio.Task[None]") -> None:
        """Wait until the gateway listens. Raises RunError."""
        opened = asyncio.create_task(server.opened.wait())
        await asyncio.wait((opened, serving), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if not serving.done():
            return
        error = serving.exception()
        if not isinstance(error, OSError):
            raise error or RunError("the gateway ended", 1)
        raise RunError(f"cannot listen on {self._flags.host} port {self._flags.port}: {error.strerror}", 1)

    async def _work(
        self,
        http: aiohttp.ClientSession,
        figures: Figures,
        serving: "asyncio.Task[None]",
        stop: asyncio.Event,
        end_now: asyncio.Event,
    ) -> int:
        """Keep services and jobs running until the signal, or until the end of `--until-done`. Then drain."""
        done, code = asyncio.Event(), 0

        async def finish() -> None:
            nonlocal code
            code = await self._run_finite(http)
            done.set()

        async with asyncio.TaskGroup() as tasks:
            work = [service.run(self._source, http) for service in self._services]
            work += [self._follow_activity(figures), self._follow_demand(figures), self._show(figures), finish()]
            work += [follow_logs(self.places.state, self._screen.print)] * self._flags.verbose
            background = [tasks.create_task(each) for each in work]
            await _wait_for_first(stop, *([done] if self._flags.until_done else ()))
            self._screen.report("ending: open requests are answered first; a second signal drops them")
            stop.set()
            background.append(tasks.create_task(self._kill_after(end_now)))
            await asyncio.gather(serving, *(job.stop() for job in self._jobs))
            await asyncio.gather(*(service.stop() for service in self._services))
            for task in background:
                task.cancel()
        self._screen.report("ended")
        return code

    async def _run_finite(self, http: aiohttp.ClientSession) -> int:
        """Run the jobs; once the services are ready, ask the question and run the burst. Returns the exit code."""
        jobs = [asyncio.create_task(self._run_job(job)) for job in self._jobs]
        await self._started.wait()
        problems = [await self._ask(http)] if self._flags.question else []
        if self._flags.load:
            burst = Burst(self._services[0], self._flags.load, self._screen.report)
            problems.append(await burst.run(self._flags.root, self._flags.picture))
        for problem in filter(None, problems):
            self._screen.report(problem)
        codes = await asyncio.gather(*jobs)
        return 1 if any(problems) or any(codes) else 0

    async def _ask(self, http: aiohttp.ClientSession) -> str:
        self._screen.print(f"> {self._flags.question}")
        return await ask(http, self._services[0], self._flags.question, self._screen.write)

    async def _run_job(self, job: OfflineJob) -> int:
        self._screen.report(f"Job {job.key}: begins; log: {job.log}")
        code = await job.run(self._flags.root)
        self._screen.report(f"Job {job.key}: ended with exit code {code}: {job.describe_end()}")
        return code

    def _report_ready(self) -> None:
        lines = [call for each in self._services for call in build_calls(each, self._flags.root)]
        self._screen.report("ready" if len(lines) < 2 else "ready; for example:")
        self._screen.print("\n".join(lines))

    async def _follow_activity(self, figures: Figures) -> None:
        """Start idle services for requests, and scale others to zero."""
        sleepers = [each for each in self._services if each.scales and may_sleep(each.service.spec)]
        while sleepers:
            await figures.read_activity(sleepers)
            await asyncio.sleep(_ACTIVITY_SECONDS)

    async def _follow_demand(self, figures: Figures) -> None:
        """Read the demand, and let the autoscaler decide in its period. A reader of the table gets it more often."""
        decided_at = time.monotonic()
        is_watched = self._screen.is_live or bool(self._flags.load)
        while True:
            await asyncio.sleep(min(_DEMAND_SECONDS if is_watched else math.inf, self._flags.sync_seconds))
            for service in self._services:
                await figures.read_demand(service)
                if self._screen.is_live:
                    await figures.count_tokens(service)
            if (now := time.monotonic()) >= decided_at + self._flags.sync_seconds:
                decided_at = now
                for service in self._services:
                    service.decide(now)

    async def _show(self, figures: Figures) -> None:
        """Report changes, and draw the table."""
        news = News(self._screen, figures)
        while True:
            for service in self._services:
                await news.report(service)
            if not self._started.is_set() and all(service.has_started for service in self._services):
                self._report_ready()
                self._started.set()
            self._screen.update(self._services, figures)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _kill_after(self, end_now: asyncio.Event) -> None:
        await end_now.wait()
        self._kill()

    def _kill(self) -> None:
        for service in self._services:
            service.kill()
        for job in self._jobs:
            job.kill()


async def _wait_for_first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _catch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return the events that the first and the second signal set."""
    stop, end_now, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        (end_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return stop, end_now
