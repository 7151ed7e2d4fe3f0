"""Threads of a step spin briefly, unless whoever runs the engine says otherwise."""

import asyncio
import logging
import re
from pathlib import Path

import pytest

from conveyor_engine.openmp import spin_briefly
from conveyor_engine.serving.engine_process import ENGINE_PROGRAM, EngineProcess


def test_what_the_environment_says_stays() -> None:
    assert spin_briefly({}) == {"GOMP_SPINCOUNT": "1000"}
    for given in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        assert spin_briefly(given) == given


async def test_the_engine_process_has_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    process = EngineProcess(ENGINE_PROGRAM, "text")
    with caplog.at_level(logging.INFO):
        await process.start()
    try:
        pid = re.findall(r"event=engine_process_started pid=(\d+)", caplog.text)[0]
        environment = b""  # empty for a moment: the kernel tells of the exec before it has set the new environment
        async with asyncio.timeout(30):
            while not environment:
                await asyncio.sleep(0.01)
                environment = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
        assert b"GOMP_SPINCOUNT=1000\0" in environment
    finally:
        await process.reap()
