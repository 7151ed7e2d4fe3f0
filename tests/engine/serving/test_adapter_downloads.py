"""Tests that adapters are downloaded by a few processes, which end when no adapter waits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.fetching.hubs import running_hub
from tests.engine.fetching.test_adapter import write_adapter

from conveyor_engine.errors import ModelError
from conveyor_engine.serving import adapter_downloads
from conveyor_engine.serving.adapter_downloads import AdapterDownloads
from conveyor_protocol.failure_reasons import FailureReason
from e2e.hub.server import Hub

NUM_ADAPTERS = 12


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """Return the processes that are started, in their order."""
    started: list[asyncio.subprocess.Process] = []
    start = adapter_downloads._start

    async def record() -> asyncio.subprocess.Process:
        started.append(await start())
        return started[-1]

    monkeypatch.setattr(adapter_downloads, "_start", record)
    return started


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for number in range(NUM_ADAPTERS):
        write_adapter(tmp_path / f"hub/org/a{number}")
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


async def test_two_processes_download_all_adapters_and_end(
    tmp_path: Path, hub: Hub, processes: list[asyncio.subprocess.Process]
) -> None:
    downloads = AdapterDownloads()
    uris = [*(f"hf://org/a{number}" for number in range(NUM_ADAPTERS)), "hf://org/none"]
    results = await asyncio.gather(
        *(downloads.fetch(f"n{number}", uri, str(tmp_path / f"{number}")) for number, uri in enumerate(uris)),
        return_exceptions=True,
    )
    assert results[:-1] == [None] * NUM_ADAPTERS
    assert all((tmp_path / f"{number}" / "adapter_config.json").exists() for number in range(NUM_ADAPTERS))
    assert isinstance(results[-1], ModelError)
    assert results[-1].reason is FailureReason.MODEL_NOT_FOUND
    assert str(results[-1]).startswith("adapter n12: ")
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)


async def test_a_process_that_ends_fails_one_download_and_is_replaced(
    tmp_path: Path, hub: Hub, processes: list[asyncio.subprocess.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = AdapterDownloads()
    monkeypatch.setattr(adapter_downloads, "_PROGRAM", "conveyor_engine.fetching.none")
    with pytest.raises(ModelError, match="adapter sql: its download ended with exit code 1"):
        await downloads.fetch("sql", "hf://org/a0", str(tmp_path / "sql"))
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    await downloads.fetch("sql", "hf://org/a0", str(tmp_path / "sql"))


async def test_an_idle_process_that_has_ended_fails_no_download(tmp_path: Path, hub: Hub) -> None:
    downloads = AdapterDownloads()
    process = await adapter_downloads._start()
    process.kill()
    await process.wait()
    downloads._idle.append(process)
    await downloads.fetch("sql", "hf://org/a0", str(tmp_path / "sql"))
    assert (tmp_path / "sql" / "adapter_config.json").exists()


async def test_a_cancelled_download_ends_at_once(
    tmp_path: Path, hub: Hub, processes: list[asyncio.subprocess.Process]
) -> None:
    hub.faults = type(hub.faults)(bytes_per_second=1.0)
    download = asyncio.create_task(AdapterDownloads().fetch("sql", "hf://org/a0", str(tmp_path / "sql")))
    async with asyncio.timeout(30):
        while not hub.requests:  # noqa: ASYNC110  # the hub runs in a thread
            await asyncio.sleep(0.01)
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    assert processes[0].returncode == -9
