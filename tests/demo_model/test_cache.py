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


def test_the_models_lie_side_by_side(trained: list[Path]) -> None:
    folders = [demo_model_directory(name) for name in module.SOURCES]
    trained_ones = [
        "demo",
        "demo-embed",
        "demo-rerank",
        "demo-classify",
        "demo-image",
        "demo-clip",
        "demo-audio",
        "demo-paint",
    ]
    assert [folder.name for folder in folders] == [*trained_ones, "custom"]
    assert len(trained) == len({module.model_key(name) for name in module.SOURCES}) == 9


def test_another_recipe_is_trained_anew_in_the_same_place(trained: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = demo_model_directory()
    monkeypatch.setattr(module, "model_key", lambda name: "another")
    assert demo_model_directory() == demo_model_directory() == before
    assert (before / "weights").read_text() == "2"


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


def test_the_key_tells_recipes_and_texts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    key = module.model_key()
    assert key == module.model_key()
    monkeypatch.setattr("e2e.demo_model.corpus.topics", {"lists": "A list display is another text now."})
    assert module.model_key() != key
