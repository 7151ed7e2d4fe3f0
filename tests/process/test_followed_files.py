"""Tests files that are loaded again when they change."""

import asyncio
import logging
from pathlib import Path

import pytest

from conveyor_process import followed_files
from conveyor_process.followed_files import FollowedFiles


async def test_content_whose_load_fails_is_tried_again_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read error that passes would otherwise keep the old certificate until the next renewal."""
    monkeypatch.setattr(followed_files, "_POLL_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    file, loaded, num_tries = tmp_path / "tls.crt", asyncio.Event(), 0
    file.write_text("old")

    def load() -> None:
        nonlocal num_tries
        num_tries += 1
        if 1 < num_tries < 5:
            raise OSError("input/output error")
        if num_tries == 5:
            loaded.set()

    following = asyncio.create_task(FollowedFiles("certificate", (file,), load).follow())
    file.write_text("new")
    async with asyncio.timeout(10):
        await loaded.wait()
    await asyncio.sleep(0.1)
    following.cancel()
    assert num_tries == 5
    assert [record.getMessage() for record in caplog.records] == [
        "event=certificate_refused consequence=the_last_stays error=input/output error",
        f"event=certificate_loaded file={file}",
    ]
