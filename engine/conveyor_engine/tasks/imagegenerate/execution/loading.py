"""Loads the parts of a pipeline through diffusers' and transformers' own classes. Used by `runner`.

Weights are read from safetensors only. The functions raise ModelError for any other content of the directory.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler
from diffusers.utils import logging as diffusers_logging
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel
from transformers.utils import logging as transformers_logging

from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.quantized.checkpoint import Checkpoint
from conveyor_engine.model_files import PIPELINE_INDEX, read_object
from conveyor_engine.tasks.imagegenerate.execution.checking import explained
from conveyor_engine.tasks.imagegenerate.execution.families.family import Family, Parts
from conveyor_engine.tasks.imagegenerate.execution.families.flux import Flux
from conveyor_engine.tasks.imagegenerate.execution.families.stable_diffusion import StableDiffusion
from conveyor_engine.tasks.imagegenerate.execution.families.stable_diffusion_3 import StableDiffusion3
from conveyor_engine.tasks.imagegenerate.execution.families.stable_diffusion_xl import StableDiffusionXL
from conveyor_engine.tasks.imagegenerate.layouts import LAYOUTS, read_layout, read_scheduler
from conveyor_engine.tasks.imagegenerate.reading import load_tokenizer

SCHEDULERS: Final[Mapping[str, Any]] = {
    each.__name__: each
    for each in (
        DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler, DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
    )
}  # fmt: skip
_OF_TRANSFORMERS: Final[Mapping[str, Any]] = {
    each.__name__: each for each in (CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel)
}
_DENOISERS: Final[Mapping[str, Any]] = {
    each.__name__: each for each in (UNet2DConditionModel, SD3Transformer2DModel, FluxTransformer2DModel)
}
_FAMILIES: Final[Mapping[str, type[Family]]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
}
assert LAYOUTS.keys() == _FAMILIES.keys()


def load_family(directory: Path, dtype: torch.dtype, device: torch.device) -> Family:
    """Load all parts of the pipeline in evaluation mode to the device. Raises ModelError."""
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"diffusers\..*")
    layout, tokenizer = read_layout(directory), load_tokenizer(directory)
    folder, kind = layout.denoiser
    parts = Parts(
        text_encoders=tuple(
            _load_part(_OF_TRANSFORMERS[each.kind], directory / each.folder, dtype, device) for each in layout.encoders
        ),
        denoiser=_load_part(_DENOISERS[kind], directory / folder, dtype, device),
        vae=_load_part(AutoencoderKL, directory / "vae", dtype, device),
        scheduler=_load_scheduler(directory),
        empty_tokens=tokenizer.encode("")[0],
        index=read_object(directory / PIPELINE_INDEX),
    )
    family = _FAMILIES[layout.pipeline](layout, parts)
    with explained(directory / "scheduler"):
        family.check_scheduler()
    family.check_parts()
    return family


def _load_scheduler(directory: Path) -> Any:
    with explained(directory / "scheduler"):
        kind = SCHEDULERS[read_scheduler(directory)]
        return kind.from_config(read_object(directory / "scheduler" / "scheduler_config.json"))


def _load_part(kind: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    own = {"torch_dtype": dtype, "low_cpu_mem_usage": False}
    if kind in _OF_TRANSFORMERS.values():
        own = {"dtype": dtype, "trust_remote_code": False}
    checkpoint = Checkpoint(folder)
    checkpoint.check_stored()
    with explained(folder):
        model, info = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **own
        )
        model = model.to(device).eval().requires_grad_(False)
    checkpoint.check_loaded(model, info)
    checks.check_weights(str(folder), info)
    return model
