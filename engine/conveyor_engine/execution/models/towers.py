"""Takes the encoders of images and sound out of a model of images and texts.

`loader` drops those of a model that answers texts only, before the weights go to the device. They are then still in the
mapped file, so they never use memory. Where the model sees, `tasks.generate` takes them out until its own layers,
adapters and limits are in place, since none of these is about the encoders.
"""

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel


class Tower(NamedTuple):
    """An encoder, and its place in the model."""

    path: str
    part: PreTrainedModel


def take_towers(model: PreTrainedModel) -> list[Tower]:
    """Take out every model within the model that neither contains its text decoder nor is a part of it."""
    decoder = model.get_decoder()
    kept = {*decoder.modules(), *(part for part in model.modules() if decoder in part.modules())}
    taken: list[Tower] = []
    for path, part in list(model.named_modules()):
        is_within = bool(taken) and path.startswith(f"{taken[-1].path}.")
        if isinstance(part, PreTrainedModel) and part not in kept and not is_within:
            _set(model, path, None)
            taken.append(Tower(path, part))
    return taken


def put_back(model: PreTrainedModel, towers: list[Tower]) -> None:
    """Put the encoders back, as they were."""
    for tower in towers:
        _set(model, tower.path, tower.part)


def _set(model: PreTrainedModel, path: str, part: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, part)
