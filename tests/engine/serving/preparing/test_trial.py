"""Tests the limits on reading a tenant's model files before they are read without limits."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.engine.chat_model import write_tokenizer

from conveyor_engine import limited
from conveyor_engine.errors import ModelError
from conveyor_engine.limited import run_limited
from conveyor_engine.serving.preparing import trial
from conveyor_engine.serving.preparing.trial import try_files


def model(folder: Path, template: str) -> Path:
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_model_whose_files_are_fine_passes(tmp_path: Path) -> None:
    try_files(model(tmp_path, "{{ messages[0].content }}"), reads_text=True)
    try_files(tmp_path / "none", reads_text=True)  # whoever reads it says what is wrong


@pytest.mark.parametrize("source", ["{{ 7 ** (7 ** 9) }}", "{{ (7 ** (7 ** 9)) | center(9) }}"])
def test_a_template_that_compiles_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(trial, "TEMPLATE_CPU_SECONDS", 1.0)
    with pytest.raises(ModelError, match="chat template takes more than"):
        try_files(model(tmp_path, source), reads_text=True)


def test_constants_of_a_template_take_no_memory_of_this_process(tmp_path: Path) -> None:
    try_files(model(tmp_path, "{{ 'a' * 3000000000 }}"), reads_text=True)  # whoever renders it has limits, too
    with pytest.raises(ModelError, match=r"takes more than|not valid"):
        try_files(model(tmp_path, "{{ 'a' * 1000000000 }}" * 4), reads_text=True)


@pytest.mark.parametrize("header_bytes", [2**31, 2**64 - 1, 99_000_000])
def test_weights_that_claim_a_huge_header_are_refused(tmp_path: Path, header_bytes: int) -> None:
    folder = model(tmp_path, "")
    (folder / "model.safetensors").write_bytes(header_bytes.to_bytes(8, "little") + b'{"a":')
    with pytest.raises(ModelError, match="is not a whole safetensors file") as caught:
        try_files(folder, reads_text=True)
    assert caught.value.reason == "ModelUnreadable"


def test_an_error_arrives_as_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not valid Jinja") as caught:
        try_files(model(tmp_path, "{% if %}"), reads_text=True)
    assert caught.value.reason == "UnsupportedModel"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        try_files(tmp_path, reads_text=True)


def test_a_process_that_ends_itself_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="what it was takes more than 9 s of CPU time"):
        run_limited("what it was", lambda: os.kill(os.getpid(), signal.SIGKILL), 9.0)
    monkeypatch.setattr(limited, "_CLOCK_TIMES", 0.01)
    with pytest.raises(ModelError, match=r"what it was takes more than 0\.1 s to read"):
        run_limited("what it was", lambda: time.sleep(1000), 10.0)
