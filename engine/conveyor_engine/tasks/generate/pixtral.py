"""Reads images for Pixtral and Mistral 3 like PixtralProcessor of transformers, which needs torchvision.

Used by `chat_pictures` only. The image processor itself is transformers', with Pillow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from transformers import ProcessorMixin


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """Reads images as transformers' class of this name. Its settings have the names of that class."""

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
