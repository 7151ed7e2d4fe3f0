"""Lists tiny random models, one for each engine, which the tests' own builders make in seconds. Used by `engines`.

Generated requests judge the API, not the answers, so nothing is trained.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.engine.classifiers import write_served_classifier
from tests.engine.dual_models import save_dual_model
from tests.engine.encoders import write_served_encoder
from tests.engine.image_models import save_image_model
from tests.engine.lora import save_adapter
from tests.engine.paint_models import save_paint_model
from tests.engine.seeing_models import save_seeing_model
from tests.engine.serving.http.agents import write_agent_model
from tests.engine.speech_models import save_speech_model

from e2e.demo_model import program

ADAPTER = "sql"
REQUEST_SECONDS_MAX = 20


@dataclass(frozen=True, slots=True)
class Model:
    """How to make and serve a model."""

    task: str
    save: Callable[[Path], object]
    has_adapter: bool = False
    context_tokens: int | None = None
    request_seconds_max: int = REQUEST_SECONDS_MAX


def _save_chat(directory: Path) -> None:
    """Save a model whose template has tools and thinking, and its adapter beside it."""
    write_agent_model(directory)
    save_adapter(directory, directory.with_name(ADAPTER), seed=1)


def _save_program(directory: Path) -> None:
    directory.mkdir()
    program.train(directory, lambda _: None)


# The first engine that serves a route gets most of its requests. Answers are short, because contexts are.
MODELS: Mapping[str, Model] = {
    "chat": Model("Generate", _save_chat, has_adapter=True, context_tokens=256),
    "see": Model("Generate", partial(save_seeing_model, "qwen2_5_vl"), context_tokens=256),
    "embed": Model("Embed", partial(write_served_encoder, "bert")),
    "clip": Model("Embed", partial(save_dual_model, "clip")),
    "siglip": Model("Embed", partial(save_dual_model, "siglip")),
    "rerank": Model("Rerank", partial(write_served_classifier, "bert", num_labels=1)),
    "classify": Model("Classify", partial(write_served_classifier, "bert", num_labels=3)),
    "image": Model("ImageClassify", partial(save_image_model, "vit")),
    "audio": Model("Transcribe", save_speech_model),
    "paint": Model("ImageGenerate", save_paint_model, request_seconds_max=1),  # a picture takes longer than a text
    "custom": Model("Custom", _save_program),
}
