"""Pictures of each layout equal those of its own pipeline of diffusers within 1 of 255, whatever joins and leaves."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.embedding_cores import make_core
from tests.engine.paint_layouts import PIPELINES, save_layout
from tests.engine.paint_models import (
    BRIEFS,
    Brief,
    Pixels,
    add,
    change_json,
    distance,
    open_pipeline,
    paint,
    read_last,
)

from conveyor_engine.errors import ModelError
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import RequestOutput

EMPTY = Brief("the blue star", 7, 3, negative="")
ALL = (*BRIEFS, EMPTY)


LAYOUTS = [pytest.param(name, marks=pytest.mark.slow if name == "flux" else ()) for name in PIPELINES]


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_layout(directory, request.param)
    return directory


def open_core(directory: Path, **changes: Any) -> EngineCore:
    return make_core(
        directory, **({"batching_mode": "continuous", "max_num_batched_tokens": None, "max_num_seqs": 8} | changes)
    )


def paint_joining(core: EngineCore, directory: Path, briefs: tuple[Brief, ...] = ALL) -> list[Pixels]:
    """Let each picture join one step after the one before it."""
    outputs: dict[str, list[RequestOutput]] = {}
    for number, brief in enumerate(briefs):
        add(core, directory, str(number), brief)
        for output in core.step(0.0):
            outputs.setdefault(output.request_id, []).append(output)
    while core.has_unfinished():
        for output in core.step(0.0):
            outputs.setdefault(output.request_id, []).append(output)
    return [read_last(outputs[str(number)], brief) for number, brief in enumerate(briefs)]


def test_pictures_that_join_and_leave_are_those_of_the_pipeline(saved: Path) -> None:
    pipeline = open_pipeline(saved)
    theirs = [paint(pipeline, brief) for brief in ALL]
    assert distance(paint_joining(open_core(saved), saved), theirs) <= 1
    assert len({picture.tobytes() for picture in theirs}) == len(ALL), "the pictures differ, so that a mix-up shows"


def test_the_warm_up_runs_the_largest_picture_and_a_batch(saved: Path) -> None:
    core = open_core(saved, warmup=True, max_num_batched_tokens=512 * 512)
    assert core.longest_warmup_step_seconds > 0
    assert distance(paint_joining(core, saved, ALL[:1]), [paint(open_pipeline(saved), ALL[0])]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "file", "changes"),
    [
        ("xl", "model_index.json", {"force_zeros_for_empty_prompt": False}),
        ("xl", "vae/config.json", {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.9, 1.1, 1.0, 1.2]}),
        ("3", "model_index.json", {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}),
        ("3", "scheduler/scheduler_config.json", {"use_dynamic_shifting": True}),
        ("flux", "scheduler/scheduler_config.json", {"use_dynamic_shifting": False, "shift": 2.0}),
    ],
)
def test_settings_act_as_in_the_pipeline(tmp_path: Path, layout: str, file: str, changes: dict[str, Any]) -> None:
    save_layout(tmp_path, layout)
    before = paint(open_pipeline(tmp_path), ALL[0])
    change_json(tmp_path / file, **changes)
    theirs = paint(open_pipeline(tmp_path), ALL[0])
    assert distance([before], [theirs]) > 1
    assert distance(paint_joining(open_core(tmp_path), tmp_path, ALL[:1]), [theirs]) <= 1


XL = "StableDiffusionXL"


@pytest.mark.parametrize(
    ("layout", "file", "changes", "sentence"),
    [
        (
            "xl",
            "model_index.json",
            {"_class_name": f"{XL}Img2ImgPipeline"},
            f"is a {XL}Img2ImgPipeline; this ",
        ),
        ("xl", "model_index.json", {"text_encoder_2": [None, None]}, "the model's text_encoder_2 is a None"),
        ("3", "model_index.json", {"scheduler": ["diffusers", "EulerDiscreteScheduler"]}, "runs only FlowMatchEuler"),
        ("3", "scheduler/scheduler_config.json", {"stochastic_sampling": True}, "stochastic_sampling is True, which"),
        ("3", "transformer/config.json", {"pos_embed_max_size": 10**5}, "pos_embed_max_size is 100000"),
        ("3", "transformer/config.json", {"pos_embed_max_size": 3}, "allows 24 pixels|weights|cannot be used"),
        ("3", "text_encoder_3/config.json", {"num_layers": 10**6}, "num_layers is 1000000"),
        ("3", "text_encoder_3/config.json", {"d_model": 64}, "cannot be used|weights"),
        ("flux", "model_index.json", {"text_encoder_2": [None, None]}, "the model's text_encoder_2 is a None"),
        ("flux", "model_index.json", {"_class_name": "FluxFillPipeline"}, "is a FluxFillPipeline; this engine"),
        ("flux", "vae/config.json", {"shift_factor": None}, "the VAE has no shift_factor"),
        ("xl", "model_index.json", {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}, "DDIMScheduler or"),
        ("xl", "unet/config.json", {"addition_embed_type": None}, "the UNet has addition_embed_type None; text_time"),
        ("xl", "unet/config.json", {"addition_time_embed_dim": 4}, "numbers beside the prompt, but .* have 48"),
        ("xl", "text_encoder_2/config.json", {"hidden_size": 2**20}, "hidden_size is 1048576"),
        ("xl", "text_encoder_2/config.json", {"max_position_embeddings": 8}, "the text encoder has 8 positions"),
    ],
)
def test_a_layout_with_other_parts_is_refused_with_a_sentence(
    tmp_path: Path, layout: str, file: str, changes: dict[str, Any], sentence: str
) -> None:
    save_layout(tmp_path, layout)
    change_json(tmp_path / file, **changes)
    with pytest.raises(ModelError, match=sentence):
        open_core(tmp_path, max_num_batched_tokens=None)


def test_a_part_without_its_folder_is_named(tmp_path: Path) -> None:
    save_layout(tmp_path, "xl")
    (tmp_path / "tokenizer_2").rename(tmp_path / "other")
    with pytest.raises(ModelError, match="has no folder tokenizer_2"):
        open_core(tmp_path)
