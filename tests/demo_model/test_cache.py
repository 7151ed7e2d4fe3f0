"""Where the demo's model is kept, with a pretended training that only counts."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import e2e.demo_model as module
from e2e.demo_model import demo_model_directory


def replace_training(monkeypatch: pytest.MonkeyPatch, train: Callable[[Path, Callable[[str], None]], None]) -> None:
    """The modules as a whole, since they would import torch."""
    for *_, recipe in module.SOURCES.values():
        monkeypatch.setitem(sys.modules, f"e2e.demo_model.{recipe}", SimpleNamespace(train=train))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were trained into, in a cache of its own."""
    folders: list[Path] = []

    def pretend(directory: Path, progress: Callable[[str], None]) -> None:
        folders.append(directory)
        (directory / "weights").write_text(str(len(folders)))

    replace_training(monkeypatch, pretend)
    monkeypatch.setattr(module, "CACHE", tmp_path)
    return folders


def test_the_model_is_trained_once(trained: list[Path]) -> None:
    assert demo_model_directory() == demo_model_directory()
    assert len(trained) == 1


def test_a_training_that_fails_leaves_nothing(trained: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path, progress: Callable[[str], None]) -> None:
        (directory / "weights").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        replace_training(broken, fail)
        with pytest.raises(KeyboardInterrupt):
            demo_model_directory()
    assert demo_model_directory().joinpath("weights").read_text() == "1"
    assert len(list(demo_model_directory().parent.iterdir())) == 1
