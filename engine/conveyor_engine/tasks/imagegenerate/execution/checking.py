"""Checks the settings of a pipeline's parts before anything is built from them. Used by `runner`."""

from pathlib import Path
from typing import Final

from transformers import CLIPTextConfig

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models import checks
from conveyor_engine.model_numbers import read_numbers
from conveyor_engine.tasks.imagegenerate.layouts import read_layout
from conveyor_protocol.failure_reasons import FailureReason

NUMBER_MAX: Final = 2**16  # limit on integers in a part's configuration, except those with a limit below
_COUNT_MAX: Final = 2**6  # limit on numbers of layers
_LIST_MAX: Final = 2**4  # limit on the length of lists, which have an element for each block
_SAMPLE_MAX: Final = 512  # limit on the sides of latents, for pictures of up to 4096 x 4096 pixels


def read_text_config(directory: Path) -> CLIPTextConfig:
    """Check the pipeline's settings, and return the first text encoder's configuration. Raises ModelError."""
    for name in read_layout(directory).classes:
        if not (directory / name).is_dir():
            raise ModelError(f"{directory} has no folder {name}", reason=FailureReason.MODEL_UNREADABLE)
        if not name.startswith("tokenizer"):
            _check_numbers(directory / name)
    with explained(directory / "text_encoder"):
        return CLIPTextConfig.from_pretrained(directory / "text_encoder", local_files_only=True)


def _check_numbers(folder: Path) -> None:
    """Raise ModelError for numbers that no real part has, before anything is built from them."""
    path = folder / ("scheduler_config.json" if folder.name == "scheduler" else "config.json")
    for place, value in read_numbers(path):
        name = place.rpartition(".")[2]
        if isinstance(value, list):
            problem = len(value) > _LIST_MAX and name != "trained_betas"
        elif "layers" in name or "num_hidden" in name:
            problem = abs(value) > _COUNT_MAX
        elif name in ("sample_size", "pos_embed_max_size"):
            problem = folder.name in ("unet", "transformer") and not 1 <= value <= _SAMPLE_MAX
        else:
            problem = isinstance(value, int) and abs(value) > NUMBER_MAX
        if problem:
            raise ModelError(f"{path}: {name} is {str(value)[:40]}, which this engine does not accept")


class explained:
    """A context that turns errors of the libraries into a ModelError about this folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, checks.TRANSFORMERS_ERRORS) and not isinstance(error, ModelError):
            checks.raise_if_of_device(error)
            raise ModelError(f"{self._folder} cannot be used: {checks.on_one_line(error)}") from error
