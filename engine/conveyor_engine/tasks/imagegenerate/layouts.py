"""The layouts of diffusers' pipelines that this task runs: their parts, and the defaults of requests. Pure.

`model_index.json` names the class of the pipeline and of each part. The names are compared with those below, and never
imported.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import PIPELINE_INDEX, read_object, read_pipeline_class

CLIP: Final = "CLIPTextModel"
PROJECTED_CLIP: Final = "CLIPTextModelWithProjection"
T5: Final = "T5EncoderModel"
STABLE_DIFFUSION_3_T5_TOKENS: Final = 256
_SAMPLERS: Final = ("DDIMScheduler", "EulerDiscreteScheduler", "PNDMScheduler", "DPMSolverMultistepScheduler")
_FLOW: Final = ("FlowMatchEulerDiscreteScheduler",)


class Encoder(NamedTuple):
    """A text encoder. Each has a tokenizer of its own."""

    number: int  # from 1 on
    kind: str  # the name of its class
    num_tokens: int | None = None  # of every prompt, padding included; None: as many as its tokenizer says
    optional: bool = False  # whether a pipeline may lack it

    @property
    def folder(self) -> str:
        return "text_encoder" if self.number == 1 else f"text_encoder_{self.number}"

    @property
    def tokenizer(self) -> str:
        return self.folder.replace("text_encoder", "tokenizer")

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """The names of the classes that its tokenizer may have."""
        return ("T5Tokenizer", "T5TokenizerFast") if self.kind == T5 else ("CLIPTokenizer", "CLIPTokenizerFast")


class Layout(NamedTuple):
    """A kind of pipeline. The defaults of requests are those of diffusers."""

    pipeline: str
    encoders: tuple[Encoder, ...]
    denoiser: tuple[str, str]  # its folder and its class
    schedulers: tuple[str, ...]
    num_steps: int
    guidance: float
    strength: float  # of an edit
    guides: bool = True  # whether guidance computes each picture a second time without the prompt

    @property
    def is_flow(self) -> bool:
        """Whether a picture begins as a mix of image and noise, whose share is the time."""
        return self.schedulers == _FLOW

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes that each part may have, by folder."""
        folder, kind = self.denoiser
        encoders = {encoder.folder: (encoder.kind,) for encoder in self.encoders}
        tokenizers = {encoder.tokenizer: encoder.tokenizers for encoder in self.encoders}
        return encoders | tokenizers | {folder: (kind,), "vae": ("AutoencoderKL",), "scheduler": self.schedulers}


_UNET: Final = ("unet", "UNet2DConditionModel")
_XL_ENCODERS: Final = (Encoder(1, CLIP), Encoder(2, PROJECTED_CLIP))
_3_ENCODERS: Final = (
    Encoder(1, PROJECTED_CLIP),
    Encoder(2, PROJECTED_CLIP),
    Encoder(3, T5, STABLE_DIFFUSION_3_T5_TOKENS, optional=True),
)
_FLUX: Final = ("transformer", "FluxTransformer2DModel")
_FLUX_ENCODERS: Final = (Encoder(1, CLIP), Encoder(2, T5, 512))
LAYOUTS: Final[Mapping[str, Layout]] = {
    layout.pipeline: layout
    for layout in (
        Layout("StableDiffusionPipeline", (Encoder(1, CLIP),), _UNET, _SAMPLERS, 50, 7.5, 0.8),
        Layout("StableDiffusionXLPipeline", _XL_ENCODERS, _UNET, _SAMPLERS, 50, 5.0, 0.3),
        Layout("StableDiffusion3Pipeline", _3_ENCODERS, ("transformer", "SD3Transformer2DModel"), _FLOW, 28, 7.0, 0.6),
        Layout("FluxPipeline", _FLUX_ENCODERS, _FLUX, _FLOW, 28, 3.5, 0.6, guides=False),
    )
}


def read_layout(directory: Path) -> Layout:
    """Return the layout that model_index.json names, without the optional parts that the pipeline lacks.

    Raises ModelError if the pipeline or one of its parts has a class that this engine does not run.
    """
    pipeline = read_pipeline_class(directory)
    if pipeline not in LAYOUTS:
        raise ModelError(f"the model is a {pipeline}; this engine makes pictures with {', '.join(LAYOUTS)} only")
    index = read_object(directory / PIPELINE_INDEX)
    layout = LAYOUTS[pipeline]
    encoders = (each for each in layout.encoders if not (each.optional and index.get(each.folder) == [None, None]))
    layout = layout._replace(encoders=tuple(encoders))
    for name, kinds in layout.classes.items():
        if (found := _name_class(index.get(name))) not in kinds:
            advice = ""
            if name == "scheduler":
                advice = f"; save the pipeline with another one (`{kinds[0]}.from_config(pipeline.scheduler.config)`)"
            raise ModelError(f"the model's {name} is a {found}, but this engine runs only {' or '.join(kinds)}{advice}")
    return layout


def read_scheduler(directory: Path) -> str:
    """Return the name of the scheduler's class in the model_index.json of a known layout."""
    return _name_class(read_object(directory / PIPELINE_INDEX).get("scheduler"))


def _name_class(entry: object) -> str:
    """Return the class of an entry [library, class], or "nothing" if the entry has another form."""
    return str(entry[1])[:100] if isinstance(entry, list) and len(entry) == 2 else "nothing"
