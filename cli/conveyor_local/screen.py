"""Shows a run: a table that follows on a terminal, otherwise lines. Used by `running`."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Final, TextIO

from conveyor_api.text import make_printable
from conveyor_local.figures import Figures
from conveyor_local.pod import Pod
from conveyor_local.service import Service

_HEAD: Final = ("SERVICE", "READY", "QUEUE", "TOKENS/S", "STATE")
_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[{}A", "\x1b[2K", "\x1b[J"
_WIDTH: Final = 160

_CHAT: Final = {"messages": [{"role": "user", "content": "Hello"}]}
_CALLS: Final = {
    "Generate": ("/chat/completions", _CHAT),
    "Embed": ("/embeddings", {"input": "Hello"}),
    "Rerank": ("/rerank", {"query": "Hello", "documents": ["Good day", "A house"]}),
}
_OPENAI: Final = {
    "Generate": "chat.completions.create(model={model!r}, messages=[{{'role': 'user', 'content': 'Hello'}}])"
    ".choices[0].message.content",
    "Embed": "embeddings.create(model={model!r}, input='Hello').data[0].embedding[:3]",
}


class Screen:
    """The output. `is_live`: whether a table follows below the lines."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self.is_live = self._output.isatty()
        self._began = time.monotonic()
        self._height = 0
        self._is_writing = False  # a line that is not complete

    def report(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self.print(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def write(self, text: str) -> None:
        """Print text without the end of a line. The table comes back with the next line of `print`."""
        self._erase()
        self._output.write("\n".join(map(make_printable, text.split("\n"))))
        self._output.flush()
        self._is_writing = True

    def print(self, text: str) -> None:
        self._erase()
        if self._is_writing:
            self._output.write("\n")
        self._is_writing = False
        for line in text.split("\n"):
            self._output.write(make_printable(line) + "\n")
        self._output.flush()

    def update(self, services: Sequence[Service], figures: Figures) -> None:
        """Draw the table, in place of the last one."""
        if not self.is_live or self._is_writing:
            return
        rows = [_HEAD, *(_describe(service, figures) for service in services)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        self._erase()
        self._output.write("".join(f"{_CLEAR_LINE}{make_printable(line)[:_WIDTH].rstrip()}\n" for line in lines))
        self._output.flush()
        self._height = len(lines)

    def _erase(self) -> None:
        if self._height:
            self._output.write(_UP.format(self._height) + _CLEAR_BELOW)
            self._height = 0


class News:
    """Reports what has happened to services since the last call."""

    def __init__(self, screen: Screen, figures: Figures) -> None:
        self._screen = screen
        self._figures = figures
        self._known: set[tuple[str, str]] = set()
        self._states: dict[str, str] = {}

    async def report(self, service: Service) -> None:
        """Report engines that are ready or have failed; without a table, also each new state."""
        for pod in service.ready_pods:
            if self._is_new(service.key, f"{pod.uid} {pod.restarts}"):
                await self._report_start(service, pod)
        failure = service.status.get("lastFailure")
        if failure:
            message = f"{failure.get('podName')} failed: {failure['reason']}: {failure.get('message', '')}"
            if self._is_new(service.key, f"{failure.get('time')} {message}"):
                self._screen.report(f"{service.key}: {message}")
        state = f"{service.ready.reason}: {service.ready.message}"
        if service.is_ending or (failure and str(failure.get("message")) in state):
            return
        if not self._screen.is_live and state != self._states.get(service.key):
            self._states[service.key] = state
            self._screen.report(f"{service.key}: {state}")

    async def _report_start(self, service: Service, pod: Pod) -> None:
        warm_up = await self._figures.read_warm_up(service.key, pod.uid)
        parts = {} if pod.restarts else {"fetch": pod.fetch_seconds}
        parts |= {"load": pod.start_seconds - (warm_up or 0)}
        parts |= {} if warm_up is None else {"warm up": warm_up}
        listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
        self._screen.report(f"{service.key}: {pod.name} is ready: {listed}")

    def _is_new(self, key: str, what: str) -> bool:
        is_new = (key, what) not in self._known
        self._known.add((key, what))
        return is_new


def _describe(service: Service, figures: Figures) -> tuple[str, ...]:
    ready, demand = service.ready, service.demand
    return (
        service.key,
        f"{len(service.ready_pods)}/{service.replicas}",
        "?" if demand is None else str(demand.waiting),
        f"{figures.find_tokens_per_second(service):.0f}",
        f"{ready.reason}: {ready.message}",
    )


def build_calls(service: Service, root: str) -> list[str]:
    """Return two commands to paste: curl, and OpenAI's client."""
    task, url = service.service.task or "Generate", service.status["url"]
    if task not in _CALLS:
        return [f"curl {url}/models"]
    path, body = _CALLS[task]
    calls = [f"curl {url}{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"]
    if task in _OPENAI:
        call = _OPENAI[task].format(model=service.service.served_model_name)
        client = f"OpenAI(base_url='{root}/v1', api_key='none')"
        calls.append(f'python -c "from openai import OpenAI; print({client}.{call})"')
    return calls
