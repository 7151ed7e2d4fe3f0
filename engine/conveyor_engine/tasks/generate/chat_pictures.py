"""Reads pictures for models of images and texts, with transformers' processor of the model.

The fork server loads it for the workers, which do not import torch. The runner loads it once for its trial. The files
come from a tenant, and no code in them is run. A model's own part of the processor is two things: the arrays that the
encoder reads, and the text that stands for a picture in a prompt.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import transformers
from PIL import Image
from transformers import AutoTokenizer, ProcessorMixin
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from conveyor_engine.errors import ModelError
from conveyor_engine.images.decoding import ASPECT_MAX, SHOWN_PIXELS_MAX
from conveyor_engine.images.processor import ERRORS
from conveyor_engine.model_files import has_image_processor, read_object
from conveyor_engine.wire.pictures import Picture, PictureTensor

_TYPES: Final = {"f": "float32", "i": "int64", "u": "int64", "b": "bool"}
_ALIKE: Final = {"SmolVLMProcessor": "Idefics3Processor"}  # the same for images; the first also needs num2words
_ASPECT_RATIOS: Final = (1, 2, 1 / 2, 4, 1 / 4, ASPECT_MAX, 1 / ASPECT_MAX)
_NAMING_FILES: Final = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """Reads images for Pixtral and Mistral 3, as transformers' class of this name, which needs torchvision.

    Its settings have the names of that class.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, patch_size: int = 16, spatial_merge_size: int = 1,
        chat_template: str | None = None, image_token: str = "[IMG]", image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]", **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_break_token, self.image_end_token = image_token, image_break_token, image_end_token
        self._side = patch_size * spatial_merge_size  # pixels for each placeholder
        self._is_mistral = spatial_merge_size > 1

    def _process_images(self, images: Any, **options: Any) -> Any:
        images = [self._enlarge(image) for image in images]
        return super()._process_images(images, **options | {"patch_size": self._side})

    def _enlarge(self, image: Image.Image) -> Image.Image:
        """Return an image with two placeholders at least. With one, the encoder of transformers' Mistral 3 raises."""
        longer = max(image.size)
        if longer > self._side or not self._is_mistral:
            return image
        width, height = (max(1, 2 * self._side * pixels // longer) for pixels in image.size)
        return image.resize((width, height))

    def replace_image_token(self, image_inputs: Mapping[str, Sequence[Any]], image_idx: int, **_: Any) -> str:
        """Return the text that stands for an image: rows of placeholders, with a token between them and one behind."""
        height, width = (int(pixels) // self._side for pixels in image_inputs["image_sizes"][image_idx])
        return self.image_break_token.join([self.image_token * width] * height) + self.image_end_token


_OWN: Final = {"PixtralProcessor": PixtralProcessor}


class ChatPictures:
    """Reads pictures for one model."""

    def __init__(self, processor: Any, place_id: int | None) -> None:
        """place_id: the token whose embedding a feature of a picture replaces. Raises ModelError if there is none."""
        self._processor = processor
        self._options = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)["images_kwargs"]
        self._options.pop("return_tensors", None)
        self.mark: str = getattr(processor, "image_token", None) or ""  # stands for a picture in a rendered prompt
        if not (self.mark and isinstance(place_id, int)):
            raise ModelError("the model's processor has no token for images")
        self.place_id = place_id
        self._place: str = processor.tokenizer.convert_ids_to_tokens(place_id)

    def read(self, image: Image.Image, *, in_half: bool = False) -> tuple[Picture, str]:
        """Return what the encoder reads of an RGB image, and the text that stands for the image in a prompt.

        in_half: half the bytes, for models that compute with 16 bits. They round more coarsely.
        """
        made, (text,) = self._processor._process_images([image], **self._options)
        unused = {*self._processor.unused_input_names, "rows", "cols", "num_crops", "num_patches"}
        tensors = {name: _pack(value, in_half) for name, value in made.items() if name not in unused}
        return Picture(text.count(self._place), tensors), text

    def read_largest(self) -> Picture:
        """Return what the encoder reads of an image of two megapixels, for the aspect ratio with the most bytes."""
        sizes = [
            (int((SHOWN_PIXELS_MAX * ratio) ** 0.5), int((SHOWN_PIXELS_MAX / ratio) ** 0.5)) for ratio in _ASPECT_RATIOS
        ]
        pictures = (self.read(Image.new("RGB", size))[0] for size in sizes)
        return max(pictures, key=lambda picture: sum(len(tensor.data) for tensor in picture.tensors.values()))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that stands for a picture."""
        token_ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=False)
        return token_ids


def _pack(value: Any, in_half: bool) -> PictureTensor:
    array = np.asarray(value if isinstance(value, np.ndarray) else [np.asarray(each) for each in value])
    dtype: Any = _TYPES[array.dtype.kind]
    if dtype == "float32" and in_half:
        dtype = "float16"
    array = np.ascontiguousarray(array, dtype=dtype)
    return PictureTensor(dtype, array.shape, memoryview(array.tobytes()))


def load_chat_pictures(directory: Path) -> ChatPictures:
    """Load the model's processor. Raises ModelError."""
    if not has_image_processor(directory):
        raise ModelError(f"{directory} has no preprocessor_config.json or processor_config.json")
    try:
        return ChatPictures(_load(directory), find_place(read_object(directory / "config.json")))
    except ERRORS as error:
        text = " ".join(str(error).split())[:500]
        raise ModelError(f"the processor in {directory} cannot be used: {type(error).__name__}: {text}") from error


def find_place(config: Mapping[str, Any]) -> int | None:
    """Return the token whose embedding a feature of a picture replaces, from the model's configuration."""
    return next((config[name] for name in ("image_token_id", "image_token_index") if name in config), None)


def _load(directory: Path) -> Any:
    """Build transformers' processor from its files, without its part for videos, which needs torch."""
    found = _find_class(directory)
    options = {"local_files_only": True, "trust_remote_code": False}
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(directory, backend="pil", **options),
        "tokenizer": AutoTokenizer.from_pretrained(directory, **options),
    }
    settings, _ = found.get_processor_dict(directory, local_files_only=True)
    # The other parts are None, which transformers' own constructor would reject.
    built: Any = type(found.__name__, (found,), {"check_argument_for_proper_class": lambda *_: None})
    arguments = [parts.get(name) for name in found.get_attributes()]
    return built.from_args_and_dict(arguments, settings)


def _find_class(directory: Path) -> Any:
    """Return the class that the files name, or that transformers has for the model's type. Raises ModelError."""
    named: list[Any] = [read_object(directory / name).get("processor_class") for name in _NAMING_FILES]
    named.append(PROCESSOR_MAPPING_NAMES.get(read_object(directory / "config.json").get("model_type")))
    for name in named:
        name = _ALIKE.get(name, name) if isinstance(name, str) else name
        found = (_OWN.get(name) or getattr(transformers, name, None)) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, ProcessorMixin):
            return found
    raise ModelError(f"transformers has no processor for the model in {directory}")
