"""Loads the parts of a Stable Diffusion pipeline through diffusers' and transformers' own classes. Used by `execution`.

Only the classes in `_CLASSES` are used. The names in `model_index.json` are compared with them and never imported.
Weights are read from safetensors only. The functions raise ModelError for any other content of the directory.
"""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler
from diffusers.utils import logging as diffusers_logging
from transformers import CLIPTextConfig, CLIPTextModel
from transformers.utils import logging as transformers_logging

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.quantized.checkpoint import Checkpoint
from conveyor_engine.model_files import PIPELINE_INDEX, read_object, read_pipeline_class
from conveyor_engine.model_numbers import read_numbers
from conveyor_engine.tasks.imagegenerate.facts import SIDE_MULTIPLE, STEPS_MAX, Size
from conveyor_engine.tasks.imagegenerate.reading import load_tokenizer
from conveyor_protocol.failure_reasons import FailureReason

PIPELINE: Final = "StableDiffusionPipeline"
SCHEDULERS: Final[Mapping[str, Any]] = {
    each.__name__: each for each in (DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler, DPMSolverMultistepScheduler)
}
_CLASSES: Final = {
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "scheduler": tuple(SCHEDULERS),
}
_NUMBER_MAX: Final = 2**16  # limit on integers in a part's configuration, except those with a limit below
_COUNT_MAX: Final = 2**6  # limit on numbers of layers
_LIST_MAX: Final = 2**4  # limit on the length of lists, which have an element for each block
_SAMPLE_MAX: Final = 512  # limit on the sides of latents, for pictures of up to 4096 x 4096 pixels
_UNSUPPORTED: Final = (  # settings of a UNet that need further inputs
    "addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a loaded pipeline."""

    text_encoder: CLIPTextModel
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    scheduler: Any  # a diffusers scheduler, of which each request gets a copy
    num_context_tokens: int
    empty_tokens: list[int]

    @property
    def factor(self) -> int:
        """The side of a picture in pixels, divided by the side of its latents."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def multiple(self) -> int:
        return max(SIDE_MULTIPLE, self.factor)

    @property
    def size(self) -> Size:
        """The model's own size, which is the size of the pictures on which it was trained."""
        sample = self.unet.config.sample_size
        height, width = (sample, sample) if isinstance(sample, int) else sample
        return Size(width * self.factor, height * self.factor)

    def copy_scheduler(self, num_inference_steps: int) -> Any:
        """Return a scheduler for one request, with its timesteps on the host."""
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        scheduler.set_timesteps(num_inference_steps)
        return scheduler

    def count_forwards(self) -> list[int]:
        """Return how many timesteps the scheduler has for each number of inference steps, from 1 on."""
        most = min(STEPS_MAX, int(self.scheduler.config.num_train_timesteps))
        return [len(self.copy_scheduler(number).timesteps) for number in range(1, most + 1)]


def read_text_config(directory: Path) -> CLIPTextConfig:
    """Check the pipeline's settings, and return the text encoder's configuration. Raises ModelError."""
    _check_index(directory)
    for name in _CLASSES:
        if not (directory / name).is_dir():
            raise ModelError(f"{directory} has no folder {name}", reason=FailureReason.MODEL_UNREADABLE)
        if name != "tokenizer":
            _check_numbers(directory / name)
    with _explained(directory / "text_encoder"):
        return CLIPTextConfig.from_pretrained(directory / "text_encoder", local_files_only=True)


def load_parts(directory: Path, dtype: torch.dtype, device: torch.device) -> Parts:
    """Load all parts in evaluation mode to the device. Raises ModelError."""
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"diffusers\..*")
    tokenizer = load_tokenizer(directory)
    text_encoder, unet, vae = (
        _load(kind, directory / name, dtype, device)
        for kind, name in ((CLIPTextModel, "text_encoder"), (UNet2DConditionModel, "unet"), (AutoencoderKL, "vae"))
    )
    with _explained(directory / "scheduler"):
        named = _read_classes(directory)["scheduler"]
        scheduler = SCHEDULERS[named].from_config(read_object(directory / "scheduler" / "scheduler_config.json"))
        parts = Parts(text_encoder, unet, vae, scheduler, tokenizer.num_tokens, tokenizer.encode("")[0])
        _check_scheduler(parts)
    _check_parts(parts)
    return parts


def _check_index(directory: Path) -> None:
    """Raise ModelError if the pipeline or one of its parts has a class that this engine does not run."""
    pipeline = read_pipeline_class(directory)
    if pipeline != PIPELINE:
        raise ModelError(f"the model is a {pipeline}; this engine makes pictures with a {PIPELINE} only")
    for name, found in _read_classes(directory).items():
        if found not in _CLASSES[name]:
            advice = ""
            if name == "scheduler":
                advice = "; save the pipeline with another one (`DDIMScheduler.from_config(pipeline.scheduler.config)`)"
            kinds = " or ".join(_CLASSES[name])
            raise ModelError(f"the model's {name} is a {found}, but this engine runs only {kinds}{advice}")


def _read_classes(directory: Path) -> dict[str, str]:
    """Return the name of each part's class in model_index.json."""
    index = read_object(directory / PIPELINE_INDEX)
    return {name: _name_class(index.get(name)) for name in _CLASSES}


def _name_class(entry: object) -> str:
    """Return the class of an entry [library, class], or "nothing" if the entry has another form."""
    return str(entry[1])[:100] if isinstance(entry, list) and len(entry) == 2 else "nothing"


def _check_numbers(folder: Path) -> None:
    """Raise ModelError for numbers that no real part has, before anything is built from them."""
    path = folder / ("scheduler_config.json" if folder.name == "scheduler" else "config.json")
    for place, value in read_numbers(path):
        name = place.rpartition(".")[2]
        if isinstance(value, list):
            problem = len(value) > _LIST_MAX and name != "trained_betas"
        elif "layers" in name or "num_hidden" in name:
            problem = abs(value) > _COUNT_MAX
        elif name == "sample_size":
            problem = folder.name == "unet" and not 1 <= value <= _SAMPLE_MAX
        else:
            problem = isinstance(value, int) and abs(value) > _NUMBER_MAX
        if problem:
            raise ModelError(f"{path}: {name} is {str(value)[:40]}, which this engine does not accept")


def _load(kind: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    own = {"dtype": dtype, "trust_remote_code": False} if kind is CLIPTextModel else _diffusers_arguments(dtype)
    checkpoint = Checkpoint(folder)
    checkpoint.check_stored()
    with _explained(folder):
        model, info = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **own
        )
        model = model.to(device).eval().requires_grad_(False)
    checkpoint.check_loaded(model, info)
    checks.check_weights(str(folder), info)
    return model


def _diffusers_arguments(dtype: torch.dtype) -> dict[str, Any]:
    return {"torch_dtype": dtype, "low_cpu_mem_usage": False}


class _explained:
    """A context that turns errors of the libraries into a ModelError about this folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, checks.TRANSFORMERS_ERRORS) and not isinstance(error, ModelError):
            checks.raise_if_of_device(error)
            raise ModelError(f"{self._folder} cannot be used: {checks.on_one_line(error)}") from error


def _check_scheduler(parts: Parts) -> None:
    config = parts.scheduler.config
    if "sde" in str(config.get("algorithm_type", "")):
        raise ModelError(f"the scheduler's algorithm_type is {config.algorithm_type}, which adds noise in each step")
    if not 1 <= int(config.num_train_timesteps) <= _NUMBER_MAX:
        raise ModelError(f"the scheduler has num_train_timesteps {config.num_train_timesteps}")
    if (betas := config.get("trained_betas")) is not None and len(betas) != config.num_train_timesteps:
        raise ModelError(f"the scheduler has {len(betas)} trained_betas for {config.num_train_timesteps} timesteps")
    parts.copy_scheduler(2)


def _check_parts(parts: Parts) -> None:
    """Raise ModelError if parts do not fit each other, or need an input that requests do not have."""
    unet, vae, text = parts.unet.config, parts.vae.config, parts.text_encoder.config
    sample = unet.sample_size
    sides = list(sample) if isinstance(sample, list | tuple) and len(sample) == 2 else [sample]
    if any(type(side) is not int for side in sides):
        raise ModelError(f"the UNet has sample_size {str(sample)[:40]}; a number or a height and a width is possible")
    for name in _UNSUPPORTED:
        if unet.get(name) is not None:
            raise ModelError(f"the UNet has {name} {unet[name]}, which needs an input other than a prompt")
    channels = vae.latent_channels
    if (unet.in_channels, unet.out_channels) != (channels, channels):
        raise ModelError(
            f"the UNet has {unet.in_channels} channels in and {unet.out_channels} out, and the VAE has {channels}: "
            "this engine makes pictures from prompts, and cannot edit pictures"
        )
    if unet.cross_attention_dim != text.hidden_size:
        raise ModelError(
            f"the UNet needs hidden states of width {unet.cross_attention_dim}, but the text encoder's have width "
            f"{text.hidden_size}"
        )
    if not vae.scaling_factor:
        raise ModelError("the VAE has no scaling_factor")
