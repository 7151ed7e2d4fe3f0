"""Messages of the task Embed: the payload of a request and the facts of a model. Only this task reads them."""

from collections.abc import Sequence
from typing import Final, Literal, Self

import msgspec

from conveyor_engine.wire.images import PictureShape
from conveyor_engine.wire.request import ModelFacts

PoolingMode = Literal["cls", "mean", "last"]
# What a request asks for, with the names of vLLM's tasks and of text-embeddings-inference's paths.
Output = Literal["embed", "token_embed", "token_classify", "embed_sparse", "embed_all"]
WHAT: Final[dict[Output, str]] = {
    "embed": "vectors of whole texts",
    "token_embed": "vectors of tokens",
    "token_classify": "weights of tokens",
    "embed_sparse": "sparse vectors",
    "embed_all": "hidden states of tokens",
}
_WHERE: Final[dict[Output, str]] = {
    "embed": "/v1/embeddings",
    "token_embed": "/pooling with task token_embed",
    "token_classify": "/pooling with task token_classify",
    "embed_sparse": "/embed_sparse",
    "embed_all": "/embed_all",
}
SPARSE_NUMBERS_MAX: Final = 2**16  # of one sparse vector; models that are trained for them make a few hundred
RESULT_MARK: Final = b"\1"  # begins the payload of other outputs than `embed`, which may have no numbers
TOO_DENSE: Final = b"\2"  # the payload of a sparse vector with more numbers
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
NUM_BYTES: Final[dict[EmbedDtype, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


class QueryTokens(msgspec.Struct, frozen=True, array_like=True):
    """The query that a document is scored with."""

    token_ids: tuple[int, ...]
    num_keys: int = 0  # as in `PoolingParams`
    drops_skiplist: bool = False


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the vector of a prompt or an image is computed. The API process validates the values."""

    dimensions: int | None = None  # number of first dimensions that are kept; None: all
    normalizes: bool | None = None  # whether to scale to length 1; None: as the model's files say
    pixels: bytes = b""  # an image, float32, channels first, in the model's shape; empty: the input is the prompt
    dtype: EmbedDtype = "float32"  # type of the numbers in the result's payload
    is_big_endian: bool = False  # byte order of these numbers
    output: Output = "embed"
    num_keys: int = 0  # number of tokens, from the first on, that the prompt's tokens attend to; 0: all
    drops_skiplist: bool = False  # whether the model's skipped tokens get no vector
    query: QueryTokens | None = None  # the result is the prompt's MaxSim with it, in place of the prompt's vectors

    def encode(self) -> bytes:
        """Return the payload of a request."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        return msgspec.msgpack.decode(payload, type=cls)


class PictureFacts(msgspec.Struct, frozen=True, array_like=True):
    """The images that a model embeds in addition to texts."""

    shape: PictureShape  # of each processed image
    num_tokens: int  # tokens that the encoder computes for one image: the image's cost in a step's budget


class TokenEncoding(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a query or a document becomes the tokens of a ColBERT model. Token ids of a client are not changed."""

    marker: int | None = None  # token that is inserted behind the first one
    max_tokens: int = 0  # longer texts are cut to this number, the marker included; 0: they are refused
    num_tokens: int = 0  # shorter texts are filled up to this number ...
    filler: int = 0  # ... with this token
    attends: bool = False  # whether the tokens attend to the fillers
    drops_skiplist: bool = False  # whether the model's skipped tokens, such as punctuation, get no vector


class EmbeddingFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Properties of a model that embeds."""

    size: int  # dimensions of its vectors
    pooling: PoolingMode | None = None  # how hidden states become a vector; None: the model itself does it
    is_matryoshka: bool = False  # whether the first dimensions of a vector are a vector themselves ...
    matryoshka_dimensions: tuple[int, ...] = ()  # ... for these numbers of dimensions; empty: for any number
    instructions: dict[str, str] = {}  # texts that begin an input, by name
    default_instruction: str = ""  # name of the instruction for inputs that name none; empty: no instruction
    pictures: PictureFacts | None = None  # None: it embeds texts only
    outputs: tuple[Output, ...] = ("embed",)  # what requests can get; warm-ups request the first
    token_size: int = 0  # dimensions of the vectors of `token_embed`
    hidden_size: int = 0  # dimensions of the vectors of `embed_all`
    encodings: dict[str, TokenEncoding] = {}  # by the name of the instruction
    padded_tokens: int = 0  # each text is padded to this length; 0: no padding

    def encode(self) -> bytes:
        """Encode the facts for `ModelFacts.of_task`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)

    def allows(self, dimensions: int) -> bool:
        """Return whether a request may set `dimensions` to this number."""
        if dimensions == self.size:
            return True
        named = self.matryoshka_dimensions
        return self.is_matryoshka and (dimensions in named if named else 1 <= dimensions < self.size)


def describe_outputs(outputs: Sequence[Output]) -> str:
    """Return what a model makes, and by which path."""
    return ", ".join(f"{WHAT[each]} ({_WHERE[each]})" for each in outputs)
