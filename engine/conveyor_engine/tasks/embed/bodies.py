"""The schemas of bodies that request vectors, with the names of OpenAI, vLLM and text-embeddings-inference. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.inputs import InputFields
from conveyor_engine.serving.preparing.tei import TeiFields
from conveyor_engine.serving.preparing.values import INTEGRAL, Inputs
from conveyor_engine.tasks.embed.facts import EmbedDtype


class VectorFields(InputFields):
    """The fields that bodies of OpenAI's and of vLLM's paths have."""

    place = Place.EMBEDDINGS

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = "float"
    """`float`: numbers. `base64`: text. `bytes`: binary, with the header `metadata`. `bytes_only`: without the
    header."""
    embed_dtype: EmbedDtype | None = "float32"
    """The number type of vectors that are sent as bytes or in base64."""
    endianness: Literal["native", "little", "big"] | None = "native"
    """The byte order of vectors that are sent as bytes or in base64; `native`: the engine's, which is little-endian."""
    dimensions: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = None
    """Number of dimensions to return, from the first on; 0: all. Only for models that were trained for it."""
    prompt_name: str | None = None
    """Name of the model's instruction to put in front of each text, such as `query`; default: the model's default."""
    use_activation: bool | None = None
    """Whether to scale vectors to length 1; default: as the model's files say."""


class EmbeddingRequest(VectorFields):
    """POST /v1/embeddings."""

    modality: Literal["text", "image"] | None = None
    """The kind of the inputs; default: text. An image is a data: URI with base64, or base64 alone."""


class PoolingRequest(VectorFields):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "token_classify"] | None = None
    """What to make of each input. `embed`: one vector. `token_embed`: a vector for each token. `token_classify`: a
    weight for each token. Default: the first of them that the model has."""


class EmbedSparseRequest(TeiFields):
    """POST /embed_sparse."""

    inputs: Inputs
    """A text, token ids, or a list of either. Each is embedded by itself. No text may be empty."""
    prompt_name: str | None = None
    """Name of the model's instruction to put in front of each text, such as `query`; default: the model's default."""


class EmbedAllRequest(EmbedSparseRequest):
    """POST /embed_all."""


class EmbedRequest(EmbedSparseRequest):
    """POST /embed."""

    normalize: bool | None = True
    """Whether to scale vectors to length 1."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Number of dimensions to return, from the first on. Only for models that were trained for it."""
