"""Removes from a model of images and texts the encoders of images and sound, which texts do not use.

`loader` calls it before the weights go to the device. They are then still in the mapped file, so the towers never use
memory.
"""

from transformers import PreTrainedModel


def drop_towers(model: PreTrainedModel) -> None:
    """Remove every model within the model that neither contains its text decoder nor is a part of it."""
    decoder = model.get_decoder()
    kept = {*decoder.modules(), *(part for part in model.modules() if decoder in part.modules())}
    for path, part in list(model.named_modules()):
        if isinstance(part, PreTrainedModel) and part not in kept:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, None)
