"""The bodies of requests for pictures, with the fields of OpenAI and of diffusers' pipelines. Pure."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.serving.preparing.values import INTEGRAL
from conveyor_engine.tasks.imagegenerate.facts import STEPS_MAX

PICTURES_MAX = 10
PROMPT_CHARACTERS_MAX = 32_000
PREVIEWS_MAX = 3
SEED_END = 2**63
_SIDE_DIGITS = 5
_FILE: dict[str, Any] = {"type": "string", "format": "binary"}


def _parse_format(value: object) -> object:
    if value == "url":
        raise PydanticCustomError(
            "response_format", "must be b64_json: this server stores no pictures, so it has no URL to give"
        )
    if value not in (None, "b64_json"):
        raise PydanticCustomError("response_format", "must be b64_json")
    return value


Text = Annotated[str, Field(max_length=PROMPT_CHARACTERS_MAX)]


class PictureOptions(ModelFields):
    """The fields of all requests for pictures."""

    place: ClassVar[Place | None] = Place.IMAGES

    prompt: Annotated[str, Field(min_length=1, max_length=PROMPT_CHARACTERS_MAX)]
    """What the picture shows. Words beyond the model's context (77 tokens for CLIP) have no effect."""
    negative_prompt: Text | None = None
    """What the picture should not show. It has no effect without guidance."""
    n: Annotated[int, Field(ge=1, le=PICTURES_MAX), INTEGRAL] | None = 1
    """Number of pictures. Each has its own seed."""
    size: (
        Annotated[
            str, Field(pattern=rf"^(auto|[1-9][0-9]{{0,{_SIDE_DIGITS - 1}}}x[1-9][0-9]{{0,{_SIDE_DIGITS - 1}}})$")
        ]
        | None
    ) = None
    """Width and height in pixels, such as `512x512`; default and `auto`: the model's own size, or for an edit that of
    `image`."""
    seed: Annotated[int, Field(ge=0, lt=SEED_END), INTEGRAL] | None = None
    """Seed of the first picture. Each further picture's seed is one higher. The same seed gives the same picture."""
    num_inference_steps: Annotated[int, Field(ge=1, le=STEPS_MAX), INTEGRAL] | None = None
    """Number of denoising steps for each picture; default: that of diffusers' pipeline, such as 50."""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    """How strongly the picture follows the prompt; default: that of diffusers' pipeline, such as 7.5. A value up to 1
    turns guidance off, which halves the cost."""
    response_format: Annotated[
        Literal["b64_json"] | None,
        PlainValidator(_parse_format),
        WithJsonSchema({"enum": ["b64_json", None]}),
    ] = None
    """Only `b64_json`: PNG in base64."""
    stream: bool | None = False
    """Whether to send the answer as server-sent events. Only with `n` 1."""
    partial_images: Annotated[int, Field(ge=0, le=PREVIEWS_MAX), INTEGRAL] | None = 0
    """Number of previews in a stream. Each shows the picture after some of its steps."""

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.partial_images and not self.stream:
            raise PydanticCustomError("partial_images", "partial_images is only allowed when stream is true")
        if self.stream and (self.n or 1) > 1:
            raise PydanticCustomError("stream", "stream is only allowed when n is 1: send a request for each picture")
        return self


class ImageGenerationRequest(PictureOptions):
    """POST /v1/images/generations."""


class ImageEditOptions(PictureOptions):
    """The fields of POST /v1/images/edits, without the file."""

    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    """How far the picture may differ from `image`: the share of the denoising steps that run; default: that of
    diffusers' pipeline, such as 0.8. With 1, nearly nothing of `image` is left."""


class ImageEditForm(ImageEditOptions):
    """POST /v1/images/edits with multipart/form-data."""

    image: Annotated[bytes, WithJsonSchema(_FILE)]
    """The picture to edit: JPEG, PNG, WebP or GIF."""
