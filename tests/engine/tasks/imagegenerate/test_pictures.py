"""Pictures equal diffusers' within 1 of 255, in float32, whatever they are batched with: in every mode."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.embedding_cores import make_core
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
    read_picture,
    save_paint_model,
)

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imagegenerate.execution import PaintRunner
from conveyor_engine.tasks.imagegenerate.facts import Size
from conveyor_engine.wire.request import FinishReason, RequestOutput

EULER = "EulerDiscreteScheduler"
SCHEDULERS: dict[str, dict[str, Any]] = {
    "DDIMScheduler": {"timestep_spacing": "trailing", "prediction_type": "v_prediction"},
    EULER: {},
    "PNDMScheduler": {"skip_prk_steps": True},
    "DPMSolverMultistepScheduler": {"use_karras_sigmas": True},
}
OTHER_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("none", "static", "dynamic")]
OTHER_SCHEDULERS = [pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULERS if name != EULER]


class Painter:
    """A tiny model, and the pictures of diffusers' pipeline."""

    def __init__(self, directory: Path, scheduler: str = "DDIMScheduler", **settings: Any) -> None:
        self.directory = directory
        save_paint_model(directory, scheduler, **settings)
        pipeline = open_pipeline(directory)
        self.pictures = [paint(pipeline, brief) for brief in BRIEFS]

    def make_core(self, **changes: Any) -> EngineCore:
        return make_core(self.directory, **({"max_num_batched_tokens": 50_000, "max_num_seqs": 8} | changes))

    def paint(self, core: EngineCore) -> list[Pixels]:
        for number, brief in enumerate(BRIEFS):
            add(core, self.directory, str(number), brief)
        outputs = run(core)
        return [read_last(outputs[str(number)], brief) for number, brief in enumerate(BRIEFS)]


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_unfinished():
        for output in core.step(0.0):
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Painter:
    return Painter(tmp_path_factory.mktemp("painter"))


@pytest.mark.parametrize("mode", ["continuous", *OTHER_MODES])
def test_every_mode_makes_the_pictures_of_diffusers(painter: Painter, mode: str) -> None:
    assert distance(painter.paint(painter.make_core(batching_mode=mode)), painter.pictures) <= 1
    kinds = {picture.tobytes() for picture in painter.pictures}
    assert len(kinds) == len(BRIEFS), "the pictures differ, so that a mix-up shows"
    assert min(int(np.ptp(picture)) for picture in painter.pictures) > 30, "they are no plain colour"


@pytest.mark.parametrize("scheduler", [EULER, *OTHER_SCHEDULERS])
def test_every_scheduler_makes_the_pictures_of_diffusers(scheduler: str, tmp_path: Path) -> None:
    painter = Painter(tmp_path, scheduler, **SCHEDULERS[scheduler])
    assert distance(painter.paint(painter.make_core(batching_mode="continuous")), painter.pictures) <= 1


def test_pictures_join_and_leave_between_steps_and_share_a_forward_by_size(painter: Painter) -> None:
    core = painter.make_core(batching_mode="continuous")
    rows = count_rows(core)
    small, wide = Size(32, 32), Size(48, 32)
    briefs = [Brief("red", 1, 4, 1.0, small), Brief("blue", 2, 4, 5.0, small), Brief("green", 3, 3, 1.0, wide)]
    pipeline = open_pipeline(painter.directory)
    outputs: dict[str, list[RequestOutput]] = {}
    for number, brief in enumerate(briefs):  # each joins while the ones before it run
        add(core, painter.directory, str(number), brief)
        for output in core.step(0.0):
            outputs.setdefault(output.request_id, []).append(output)
    for name, later in run(core).items():
        outputs.setdefault(name, []).extend(later)
    # by step: the first alone, then with two rows of the second, then with the third in a forward of its own
    assert rows == [[1], [3], [3, 1], [3, 1], [2, 1]]
    made = [read_last(outputs[str(number)], brief) for number, brief in enumerate(briefs)]
    assert distance(made, [paint(pipeline, brief) for brief in briefs]) <= 1


def count_rows(core: EngineCore) -> list[list[int]]:
    """By step, the rows of each of the denoiser's forwards."""
    runner = core.executor
    assert isinstance(runner, PaintRunner)
    steps: list[list[int]] = []
    forward, begin = runner._family.parts.denoiser.forward, runner.begin

    def note(sample: torch.Tensor, *others: Any, **named: Any) -> Any:
        steps[-1].append(len(sample))
        return forward(sample, *others, **named)

    runner._family.parts.denoiser.forward = note
    runner.begin = lambda plan: (steps.append([]), begin(plan))[1]  # type: ignore[method-assign]
    return steps


def test_a_batch_of_dynamic_takes_no_one_in_and_prefers_one_size(painter: Painter) -> None:
    core = painter.make_core(batching_mode="dynamic", max_num_seqs=2, batching_window_seconds=10.0)
    rows = count_rows(core)
    sizes = (Size(32, 32), Size(48, 32), Size(32, 32), Size(48, 32))
    for number, size in enumerate(sizes):
        add(core, painter.directory, str(number), Brief("red", number, 2 + number // 2, 1.0, size))
    run(core)
    assert rows == [[2], [2], [1], [2], [2], [1]]
    assert core.stats().batch_close_reasons == {"full": 2}


def test_a_step_has_no_more_pixels_than_its_budget(painter: Painter) -> None:
    core = painter.make_core(batching_mode="continuous", max_num_batched_tokens=2 * 32 * 32 + 32 * 32)
    rows = count_rows(core)
    for number, guidance in enumerate((5.0, 1.0, 5.0)):
        add(core, painter.directory, str(number), Brief("red", number, 2, guidance))
    run(core)
    assert rows == [[3], [3], [2], [2]]


def test_previews_are_the_picture_so_far_and_held_back_by_no_one_but_static(painter: Painter) -> None:
    brief = Brief("the blue star", 1, 6, previews=(2, 4))
    for mode, number in (("continuous", 3), ("static", 1)):
        core = painter.make_core(batching_mode=mode)
        add(core, painter.directory, "a", brief)
        outputs = run(core)["a"]
        assert [output.finish_reason for output in outputs] == [None] * (number - 1) + [FinishReason.STOP]
        pictures = [read_picture(output.payload or b"", brief.size) for output in outputs]
        assert len({picture.tobytes() for picture in pictures}) == number
        assert distance(pictures[-1:], [paint(open_pipeline(painter.directory), brief)]) <= 1


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("where", ["denoiser", "vae"])
def test_a_step_that_fails_once_is_run_again_and_changes_no_picture(
    painter: Painter, where: str, overlap: bool
) -> None:
    core = make_core(
        painter.directory, overlap=overlap, batching_mode="continuous", max_num_seqs=8, max_num_batched_tokens=50_000
    )
    runner = core.executor
    assert isinstance(runner, PaintRunner)
    part = getattr(runner._family.parts, where)
    name = "forward" if where == "denoiser" else "decode"
    original, calls = getattr(part, name), [0]

    def fail_at_times(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] % 9 == 2:
            raise RuntimeError("out of luck")
        return original(*arguments, **named)

    setattr(part, name, fail_at_times)
    try:
        assert distance(painter.paint(core), painter.pictures) <= 1
    finally:
        setattr(part, name, original)
    assert calls[0] > 3


def test_a_picture_that_is_not_finite_ends_alone(painter: Painter) -> None:
    core = painter.make_core(batching_mode="continuous")
    add(core, painter.directory, "good", BRIEFS[0])
    add(core, painter.directory, "bad", Brief("red", 1, 400, 100.0))
    core.step(0.0)
    runner = core.executor
    assert isinstance(runner, PaintRunner)
    broken = next(row for row in runner._rows.values() if row.request.num_inference_steps == 400)
    broken.latents = torch.full_like(broken.latents, float("nan"))
    outputs = run(core)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert "the model's picture is not finite" in str(outputs["bad"][-1].message)
    assert distance([read_last(outputs["good"], BRIEFS[0])], painter.pictures[:1]) <= 1
    assert core.stats().num_steps < 10, "it ends at once"


def test_a_row_does_not_keep_the_picture_to_edit(painter: Painter) -> None:
    core = painter.make_core()
    add(core, painter.directory, "edit", Brief("blue", 9, 4, strength=0.5))
    run(core)
    runner = core.executor
    assert isinstance(runner, PaintRunner)
    kept = [row for row in runner._rows.values() if row.request.num_skipped]
    assert [(row.request.image, len(row.digest)) for row in kept] == [(b"", 32)]


def test_an_aborted_picture_leaves_its_row_to_the_next_one(painter: Painter) -> None:
    core = painter.make_core(batching_mode="continuous", max_num_seqs=1)
    add(core, painter.directory, "a", Brief("blue", 9, 9))
    core.step(0.0)
    core.abort("a")
    add(core, painter.directory, "b", BRIEFS[0])
    outputs = run(core)
    assert outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert distance([read_last(outputs["b"], BRIEFS[0])], painter.pictures[:1]) <= 1


def test_the_warm_up_runs_the_largest_batch_and_the_largest_picture(painter: Painter) -> None:
    core = painter.make_core(batching_mode="continuous", warmup=True, max_num_batched_tokens=8 * 2 * 32 * 32)
    assert core.executor.extra_warmup_tokens == (2 * 64 * 64,)
    assert core.longest_warmup_step_seconds > 0
    assert distance(painter.paint(core), painter.pictures) <= 1


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("model_index.json", {"_class_name": "WanPipeline"}, "the model is a WanPipeline"),
        ("model_index.json", {"unet": ["diffusers", "UNet2DModel"]}, "the model's unet is a UNet2DModel"),
        ("model_index.json", {"scheduler": ["diffusers", "DDPMScheduler"]}, "this engine runs only DDIMScheduler or"),
        ("model_index.json", {"text_encoder": ["mine", "Encoder"]}, "the model's text_encoder is a Encoder"),
        ("unet/config.json", {"block_out_channels": [8, 2**30]}, "block_out_channels is 1073741824"),
        ("unet/config.json", {"layers_per_block": 10**6}, "layers_per_block is 1000000"),
        ("unet/config.json", {"sample_size": 10**5}, "sample_size is 100000"),
        ("unet/config.json", {"sample_size": None}, "the UNet has sample_size None; a number or a height and a width"),
        ("unet/config.json", {"sample_size": [8, 8, 8]}, "the UNet has sample_size "),
        ("unet/config.json", {"in_channels": 9}, "the weights|cannot be used"),
        ("vae/config.json", {"scaling_factor": 0}, "the VAE has no scaling_factor"),
        ("text_encoder/config.json", {"max_position_embeddings": 8}, "prompts of 16 tokens"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**9}, "num_train_timesteps is 1000000000"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "mine"}, "mine"),
        ("scheduler/scheduler_config.json", {"trained_betas": [0.1] * 10}, "has 10 trained_betas for 1000 timesteps"),
    ],
)
def test_what_is_no_such_pipeline_is_refused(
    tmp_path: Path, painter: Painter, file: str, changes: dict[str, Any], sentence: str
) -> None:
    directory = copy_model(painter.directory, tmp_path)
    change_json(directory / file, **changes)
    with pytest.raises(ModelError, match=sentence):
        make_core(directory, max_num_batched_tokens=None)


def copy_model(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / "copy"))


def test_pickled_weights_are_refused(tmp_path: Path, painter: Painter) -> None:
    directory = copy_model(painter.directory, tmp_path)
    (directory / "vae/diffusion_pytorch_model.safetensors").rename(directory / "vae/diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match="vae cannot be used"):
        make_core(directory, max_num_batched_tokens=None)


@pytest.mark.parametrize("part", ["text_encoder/model", "unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model"])
def test_quantized_weights_are_refused(tmp_path: Path, painter: Painter, part: str) -> None:
    file = copy_model(painter.directory, tmp_path) / f"{part}.safetensors"
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="is quantized"):
        make_core(file.parents[1], max_num_batched_tokens=None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_num_batched_tokens": 100}, "a step of one picture of 32x32 with guidance computes 2048 pixels"),
    ],
)
def test_settings_of_texts_are_refused(painter: Painter, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        painter.make_core(**changes)
