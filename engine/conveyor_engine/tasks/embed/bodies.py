"""The schemas of bodies that request vectors, with the names of OpenAI, vLLM and text-embeddings-inference. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.inputs import InputFields
from conveyor_engine.serving.preparing.tei import TeiFields
from conveyor_engine.serving.preparing.values import INTEGRAL, Inputs
from conveyor_engine.wire.embedding import EmbedDtype


class EmbeddingRequest(InputFields):
    """POST /v1/embeddings."""

    place = Place.EMBEDDINGS

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = "float"
    """Numbers, or their bytes in base64; or an answer of bytes alone, with the header `metadata` or without it."""
    embed_dtype: EmbedDtype | None = "float32"
    """The type of numbers that are sent as bytes."""
    endianness: Literal["native", "little", "big"] | None = "native"
    """The order of their bytes; `native`: the engine's, which is little."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Return only the first dimensions, this many; for models that were trained for it."""
    prompt_name: str | None = None
    """Which of the model's instructions begins each text, such as `query`; default: the model's own default."""
    modality: Literal["text", "image"] | None = None
    """What the inputs are; default: text. Each image is a data: URI with base64, or base64 alone."""
    use_activation: bool | None = None
    """Whether vectors have length 1; default: as the model's files say."""


class EmbedRequest(TeiFields):
    """POST /embed."""

    inputs: Inputs
    """A text, token ids, or a list of either: each is embedded by itself. No text may be empty."""
    normalize: bool | None = True
    """Whether vectors have length 1."""
    prompt_name: str | None = None
    """Which of the model's instructions begins each text, such as `query`; default: the model's own default."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Only so many dimensions, the first ones, of a model that was trained for it."""
