"""generation_config.json's sampling defaults: read, applied where a request says nothing, and turned off."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import IDLE, EngineServer

from conveyor_engine.errors import ModelError
from conveyor_engine.serving.preparing.sampling_defaults import FILE, SamplingDefaults, read_sampling_defaults


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text)
    return folder


def test_a_model_that_says_nothing_has_openai_s(tmp_path: Path) -> None:
    neutral = SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)
    assert read_sampling_defaults(tmp_path) == neutral
    assert read_sampling_defaults(write(tmp_path, {"eos_token_id": 5, "temperature": None})) == neutral


def test_what_the_model_says_is_read(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "max_new_tokens": 5}
    content |= {"min_p": 0.1, "repetition_penalty": 1.05}
    assert read_sampling_defaults(write(tmp_path, content)) == SamplingDefaults(0.6, 0.95, 20, 0.1, 1.05)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("min_p", 2),
        ("temperature", 5),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_k", 1.5),
    ],
)
def test_what_cannot_be_done_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        defaults = read_sampling_defaults(write(tmp_path, {"temperature": 0.6, "top_k": 5, name: value}))
    assert defaults == SamplingDefaults(
        temperature=1.0 if name == "temperature" else 0.6, top_k=0 if name == "top_k" else 5
    )
    (record,) = caplog.records
    assert "event=sampling_default_ignored" in record.getMessage()
    assert name in record.getMessage()


@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 1.0), ("min_p", 0)])
def test_a_neutral_value_needs_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_sampling_defaults(write(tmp_path, {name: value})) == SamplingDefaults()
    assert not caplog.records


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_file_that_is_none_is_an_error_with_its_name(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=FILE):
        read_sampling_defaults(tmp_path)


@pytest.mark.parametrize("source", ["model", "openai"])
def test_they_apply_when_the_request_says_nothing(chat_model: Path, tmp_path: Path, source: str) -> None:
    model = tmp_path / "narrow"
    shutil.copytree(chat_model, model)
    write(model, {**json.loads((model / FILE).read_text()), "temperature": 0.7, "top_k": 1})
    with EngineServer(tmp_path / "server", model, IDLE, sampling_defaults=source) as server:
        server.wait_ready()

        def text(**fields: Any) -> str:
            body = {"prompt": "the fox", "max_tokens": 30, "seed": 5, "ignore_eos": True, **fields}
            answer: str = server.post("/v1/completions", body).json()["choices"][0]["text"]
            return answer

        likeliest, drawn = text(temperature=0), text(temperature=1, top_k=-1)
        assert likeliest != drawn
        assert text() == text(temperature=None, top_k=None) == (likeliest if source == "model" else drawn)
        assert text(top_k=-1, temperature=1) == drawn
        assert "event=sampling_defaults temperature=0.7 top_p=1 top_k=1" in server.log or source == "openai"
