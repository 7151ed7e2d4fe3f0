"""The schemas of bodies that request labels of images, with the options of transformers' pipeline. Pure."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from conveyor_engine.serving.preparing.pictures import IMAGES_MAX
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.serving.preparing.values import INTEGRAL

TOP_K = 5

_FILES: dict[str, Any] = {
    "type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1, "maxItems": IMAGES_MAX
}  # fmt: skip


class ImageOptions(ModelFields):
    """The options that choose which scores the response has."""

    top_k: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = TOP_K
    """How many labels each image gets, best first; all labels if the model has fewer."""
    function_to_apply: Literal["default", "sigmoid", "softmax", "none"] | None = "default"
    """The function that turns logits into scores. default: softmax if labels exclude each other, sigmoid for
    one label or if several labels can apply, none for regression."""


class ImageClassificationRequest(ImageOptions):
    """POST /v1/images/classify with JSON."""

    images: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=IMAGES_MAX)]
    """The images, each in base64 or as a data: URI with base64. URLs are not fetched."""


class ImageClassificationForm(ImageOptions):
    """POST /v1/images/classify with multipart/form-data."""

    image: Annotated[list[bytes], WithJsonSchema(_FILES)]
    """An image file. Send several parts with this name for several images."""
