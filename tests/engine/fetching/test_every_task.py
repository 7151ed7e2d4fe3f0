"""Tests that an engine starts with what `fetch` downloads from a hub, for each kind of model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.classifiers import write_served_classifier
from tests.engine.dual_models import save_dual_model
from tests.engine.encoders import write_served_encoder
from tests.engine.fetching.hubs import Fetch, running_hub
from tests.engine.image_models import save_image_model
from tests.engine.paint_layouts import PIPELINES, save_layout
from tests.engine.paint_models import save_paint_model
from tests.engine.processes import EngineServer
from tests.engine.speech_models import save_speech_model

from conveyor_engine.registry import find_packages


def _write_labels(to: Path) -> None:
    write_served_classifier("bert", to, 3)


SAVED: dict[str, tuple[Callable[[Path], object], ...]] = {
    "generate": (write_chat_model,),
    "embed": (lambda to: write_served_encoder("bert", to), lambda to: save_dual_model("clip", to)),
    "rerank": (lambda to: write_served_classifier("bert", to),),
    "classify": (_write_labels,),
    "imageclassify": (lambda to: save_image_model("vit", to),),
    "imagegenerate": (save_paint_model, *(partial(save_layout, layout=layout) for layout in PIPELINES)),
    "transcribe": (save_speech_model,),
}
OF_TEXT = ("generate", "rerank", "classify")  # test_fetch.py has their files; here they are for the night
BY_ITS_OWN_TEST = {"custom"}  # test_bucket.py has its files


def test_every_task_is_here() -> None:
    assert SAVED.keys() | BY_ITS_OWN_TEST == set(find_packages())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "save"),
    [
        pytest.param(task, save, marks=[pytest.mark.nightly] * (task in OF_TEXT))
        for task, all_of in SAVED.items()
        for save in all_of
    ],
)
def test_an_engine_starts_with_what_was_fetched(
    task: str, save: Callable[[Path], object], fetch_from: Fetch, tmp_path: Path, target: Path
) -> None:
    repository = tmp_path / "hub" / "org" / "model"
    repository.mkdir(parents=True)
    save(repository)
    with running_hub(tmp_path / "hub") as hub:
        fetch_from(hub.url, "hf://org/model", target)
    with EngineServer(tmp_path / "engine", target, task=task) as engine:
        engine.wait_ready()
