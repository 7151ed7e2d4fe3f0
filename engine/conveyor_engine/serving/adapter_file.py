"""Follows the file of the setting `adapters_file`: downloads, loads and unloads adapters while the engine serves.

Created by `server`. Each adapter has a task of its own, so that one that cannot be fetched or loaded delays no other.
`adapter_downloads` downloads them, with the limits and the reasons of the command `fetch`. An adapter with a new source
replaces the old one when it is loaded. Until then, and if it fails, the old one answers.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from conveyor_engine.config.kinds import ADAPTERS_MAX
from conveyor_engine.errors import ModelError, explain_crash
from conveyor_engine.fetching.downloads import list_downloads, remove_download
from conveyor_engine.serving.adapter_downloads import AdapterDownloads
from conveyor_engine.serving.engine_client import EngineClient
from conveyor_engine.wire.worker import ServedAdapter
from conveyor_process.log import quote
from conveyor_protocol.engine_pages import AdapterState

_POLL_SECONDS: Final = 1.0  # the kubelet replaces a symbolic link, for which a watch on the file gets no event
_PREPARING_SECONDS: Final = 60.0  # longer than a worker takes to prepare a request
_FIRST_WAIT_SECONDS: Final = 10.0  # before another attempt; doubled after each
_WAIT_SECONDS_MAX: Final = 300.0
_FILE_BYTES_MAX: Final = 1 << 20
_MESSAGE_CHARACTERS: Final = 500
_MESSAGES_MAX: Final = 50  # in the report, which a gateway reads
_log = logging.getLogger(__name__)


class _Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter is, and where from it has to be downloaded. Empty: it is there already."""

    directory: Annotated[str, msgspec.Meta(max_length=1024)]
    uri: str = ""


class _Retired(NamedTuple):
    """An adapter that was removed or replaced. Its files stay until no open request has it."""

    directory: str
    preparing_until: float  # when no request that has selected it is with a worker any more


class AdapterFile:
    """The adapters of the file, and what has become of each."""

    def __init__(self, path: Path, served: dict[str, ServedAdapter], engine: EngineClient, folder: str = "") -> None:
        """served: the adapters that requests may select, which this class changes. It keeps those that it has now.

        folder: the setting `adapters_folder`. Downloads in it are removed when no adapter has them.
        """
        self._path, self._served, self._engine = path, served, engine
        self._folder = Path(folder) if folder else None
        engine.on_adapter_lost = self._lose
        self._fixed = frozenset(served)
        self._numbers = itertools.count(len(served) + 1)
        self._sources: dict[str, _Source] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._downloads = AdapterDownloads()
        self._running: dict[asyncio.Task[None], str] = {}  # downloads and loads, and their directories
        self._removable: set[str] = set() if self._folder is None else {*map(str, list_downloads(self._folder))}
        self._states: dict[str, AdapterState] = {}
        self._retired: dict[int, _Retired] = {}  # by number: those that no new request selects
        self._is_settled = False
        self._refused = ""

    @property
    def states(self) -> dict[str, AdapterState]:
        """What has become of each adapter of the file, by name."""
        return self._states

    def report(self) -> dict[str, AdapterState]:
        """Return the states with a limited number of messages."""
        failed = [name for name, state in self._states.items() if state.message]
        left_out = {name: msgspec.structs.replace(self._states[name], message="") for name in failed[_MESSAGES_MAX:]}
        return self._states | left_out

    @property
    def is_settled(self) -> bool:
        """Whether each adapter of the first file has been loaded, or has failed once."""
        return self._is_settled

    async def follow(self) -> None:
        """Follow the file until cancelled."""
        try:
            while True:
                try:
                    self._look()
                    self._unload()
                    await self._clean()
                except Exception:
                    _log.exception("event=adapters_file_not_followed consequence=another_attempt")
                self._is_settled |= all(state.state != "Loading" for state in self._states.values())
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            for task in self._running:
                task.cancel()

    def _look(self) -> None:
        """Begin to bring what is new in the file, and remove what is no longer there. A wrong file changes nothing."""
        try:
            wanted = self._read()
        except (OSError, ValueError) as error:
            if self._refused != str(error):
                _log.warning("event=adapters_file_refused consequence=the_last_stays error=%s", quote(str(error)))
            self._refused = str(error)
            return
        self._refused = ""
        for name in self._sources.keys() - wanted.keys():
            self._remove(name)
        for name, source in wanted.items():
            if self._sources.get(name) != source:
                self._sources[name] = source
                self._begin(name, source)

    def _read(self) -> dict[str, _Source]:
        content = self._path.read_bytes()
        if len(content) > _FILE_BYTES_MAX:
            raise ValueError(f"{self._path} has more than {_FILE_BYTES_MAX} bytes")
        found = msgspec.yaml.decode(content or b"{}", type=dict[str, _Source])
        if len(found) > ADAPTERS_MAX:
            raise ValueError(f"{self._path} has {len(found)} adapters, more than {ADAPTERS_MAX}")
        if clash := sorted(self._fixed.intersection(found)):
            raise ValueError(f"the adapter {clash[0]!r} is in {self._path} and in the setting `adapters`")
        return found

    def _begin(self, name: str, source: _Source) -> None:
        self._cancel(name)
        self._served.setdefault(name, ServedAdapter(0, source.directory))
        self._states[name] = AdapterState(source.directory, "Loading", serves=self._served[name].number > 0)
        directory = Path(source.directory)
        if self._folder is not None and directory.is_relative_to(self._folder) and ".." not in directory.parts:
            self._removable.add(source.directory)
        self._tasks[name] = self._start(self._bring(name, source), source.directory)

    def _start(self, work: Coroutine[None, None, None], directory: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running[task] = directory
        task.add_done_callback(self._running.pop)
        return task

    def _remove(self, name: str) -> None:
        self._cancel(name)
        del self._sources[name], self._states[name]
        self._retire(self._served.pop(name))
        _log.info("event=adapter_removed adapter=%s", name)

    def _cancel(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    def _retire(self, adapter: ServedAdapter) -> None:
        """Unload the adapter when no request has it any more. Until then, its files may be read again."""
        if adapter.number:
            self._retired[adapter.number] = _Retired(adapter.directory, time.monotonic() + _PREPARING_SECONDS)

    def _unload(self) -> None:
        for number, retired in list(self._retired.items()):
            if time.monotonic() >= retired.preparing_until and not self._engine.has_requests(number):
                del self._retired[number]
                self._engine.unload_adapter(number)

    async def _clean(self) -> None:
        """Remove the directories that nothing uses any more. The file is not read meanwhile, so nothing begins to."""
        if self._refused:
            return
        used = {*self._running.values()}
        used |= {each.directory for each in self._sources.values()} | {each.directory for each in self._served.values()}
        used |= {each.directory for each in self._retired.values()}
        for directory in sorted(self._removable - used):
            if not any(Path(each).is_relative_to(directory) for each in used):
                self._removable.discard(directory)
                await asyncio.to_thread(remove_download, Path(directory))
                _log.info("event=adapter_files_removed directory=%s", quote(directory))

    async def _bring(self, name: str, source: _Source, after_seconds: float = 0.0) -> None:
        """Download and load the adapter. Tries again after failures, with growing waits."""
        await asyncio.sleep(after_seconds)
        for wait_seconds in _waits():
            try:
                if source.uri:
                    await self._downloads.fetch(name, source.uri, source.directory)
                await asyncio.shield(self._start(self._load(name, source), source.directory))
            except Exception as error:
                self._fail(name, source, error)
                await asyncio.sleep(wait_seconds)
            else:
                return

    def _fail(self, name: str, source: _Source, error: Exception) -> None:
        if not isinstance(error, ModelError):  # such as a full disk, or no more processes
            reason, why = explain_crash(error)
            error = ModelError(f"the adapter {name!r} cannot be used: {why}", reason=reason)
        serves = self._served[name].number > 0
        message = str(error)[:_MESSAGE_CHARACTERS]
        self._states[name] = AdapterState(source.directory, "Failed", error.reason, message, serves)
        _log.warning("event=adapter_failed adapter=%s reason=%s message=%s", name, error.reason, error)

    def _lose(self, number: int, error: ModelError) -> None:
        """Note that the engine has lost an adapter, and bring it again later."""
        name = next((name for name, each in self._served.items() if each.number == number), None)
        if name is None or name in self._fixed:
            return
        self._served[name] = ServedAdapter(0, self._served[name].directory)
        source, state = self._sources[name], self._states[name]
        self._states[name] = msgspec.structs.replace(state, serves=False)
        if state.state == "Ready":  # otherwise it is brought already
            self._fail(name, source, error)
            self._tasks[name] = self._start(self._bring(name, source, _FIRST_WAIT_SECONDS), source.directory)

    async def _load(self, name: str, source: _Source) -> None:
        """Load the adapter and let requests select it. It is not cancelled, so that the engine's answer is known."""
        number = next(self._numbers)
        await self._engine.load_adapter(number, name, source.directory)
        if self._sources.get(name) != source:  # the file has changed meanwhile
            self._retire(ServedAdapter(number, source.directory))
            return
        old, self._served[name] = self._served[name], ServedAdapter(number, source.directory)
        self._states[name] = AdapterState(source.directory, "Ready", serves=True)
        self._retire(old)
        _log.info("event=adapter_loaded adapter=%s number=%d directory=%s", name, number, quote(source.directory))


def _waits() -> Iterator[float]:
    wait = _FIRST_WAIT_SECONDS
    while True:
        yield wait
        wait = min(2 * wait, _WAIT_SECONDS_MAX)
