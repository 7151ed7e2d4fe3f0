"""Files of a model that cannot be read are told as that, by the fetch of a mounted model and by the engine."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from conveyor_engine.__main__ import main
from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import WEIGHTS_INDEX, check_files

NOBODY = 65532


@pytest.fixture
def model() -> Iterator[Path]:
    """Where another user may look: pytest's own folders are closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="model-"))
    directory.chmod(0o755)
    (directory / "config.json").write_text("{}")
    save_file({"a": numpy.zeros(64, numpy.float32)}, directory / "model.safetensors")
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


@contextmanager
def another_user() -> Iterator[int]:
    """As the user of a pod is, to whom a mode says something; root reads everything."""
    before = os.geteuid()
    if before:
        yield before
        return
    os.seteuid(NOBODY)
    try:
        yield NOBODY
    finally:
        os.seteuid(before)


def find_problem(directory: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check_files(directory)
    return caught.value


def test_a_whole_model_is_checked_without_a_word(model: Path) -> None:
    (model / "unfinished.safetensors").mkdir()
    (model / "notes.txt").touch(0)
    check_files(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_the_user_may_not_read_is_reported_with_the_user_and_what_to_do(model: Path, name: str) -> None:
    (model / name).chmod(0)
    with another_user():
        problem = find_problem(model)
    assert problem.reason == "ModelUnreadable"
    assert f"user {os.getuid()} of group {os.getgid()} cannot read {model / name}: Permission denied" in str(problem)
    assert "chmod -R a+rX" in str(problem)


def cut_off(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-7])


def leave_empty(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def put_pointer(model: Path) -> None:
    """As a checkout without Git LFS has it."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
    (model / "model.safetensors").write_text(pointer)


@pytest.mark.parametrize("damage", [cut_off, leave_empty, put_pointer])
def test_incomplete_weights_are_reported_as_incomplete(model: Path, damage: Callable[[Path], None]) -> None:
    damage(model)
    problem = find_problem(model)
    assert problem.reason == "ModelUnreadable"
    assert "model.safetensors" in str(problem)
    assert "is not a whole safetensors file, copy or download it again" in str(problem)


def test_weights_that_the_index_names_and_nobody_copied_are_reported(model: Path) -> None:
    (model / WEIGHTS_INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}})
    )
    problem = find_problem(model)
    assert problem.reason == "ModelUnreadable"
    assert str(problem).endswith(f"{WEIGHTS_INDEX} names second.safetensors, which is not there")


@pytest.mark.parametrize("name", ["/dev/zero", "../other/model.safetensors", "folder/link.safetensors", ".."])
def test_an_index_that_leads_out_of_the_directory_is_refused(model: Path, name: str) -> None:
    (model / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    problem = find_problem(model)
    assert problem.reason == "UnsupportedModel"
    assert f"{WEIGHTS_INDEX} in {model} names {name!r}, which is not a file of this directory" in str(problem)


@pytest.mark.parametrize("index", [[], {"weight_map": [1]}, {"weight_map": {"a": 1}}])
def test_an_index_that_says_nothing_is_left_to_the_loader(model: Path, index: object) -> None:
    (model / WEIGHTS_INDEX).write_text(json.dumps(index))
    if isinstance(index, list):
        assert find_problem(model).reason == "UnsupportedModel"
    else:
        check_files(model)


@pytest.mark.parametrize("command", ["fetch", "serve"])
def test_both_commands_report_the_problem_in_their_termination_message(
    model: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cut_off(model)
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "log"))
    arguments = ["--uri", "pvc://models/m", "--target", str(model)] if command == "fetch" else ["--model", str(model)]
    assert main([command, *arguments]) == 1
    assert json.loads((tmp_path / "log").read_text())["reason"] == "ModelUnreadable"
