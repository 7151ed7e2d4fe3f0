"""Pictures in a prompt: what the model's encoder reads of each one, and where its features belong in the prompt.

Workers write them as the payload of a request, and `tasks.generate` reads them. The scheduler sees only `PictureSpan`.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import msgspec

_Dtype = Literal["float32", "float16", "int64", "bool"]


class PictureSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a prompt that stand for a picture, from the first placeholder to the last, and its content."""

    start: int
    end: int
    digest: bytes  # of the picture as the encoder reads it, and of the number of its placeholders


class PictureTensor(msgspec.Struct, frozen=True, array_like=True):
    """An array that the encoder reads."""

    dtype: _Dtype
    shape: tuple[int, ...]
    data: memoryview  # of the payload that it was decoded from: megabytes, which nobody copies


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """A picture as the encoder reads it."""

    num_places: int  # placeholders in the prompt; each gets one feature
    tensors: dict[str, PictureTensor]

    def digest(self, cache_salt: str | None = None) -> bytes:
        """Return a hash of the content, 128 bits long, so that no client can forge a hit in a cache.

        With another salt it is another one, so that features are shared only with requests of the same salt.
        """
        digest = blake2b(digest_size=16, person=b"picture")
        digest.update(msgspec.msgpack.encode(cache_salt))
        digest.update(msgspec.msgpack.encode(self))
        return digest.digest()


class PlacedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture in a request."""

    span: PictureSpan
    picture: Picture


_decode: Final = msgspec.msgpack.Decoder(list[PlacedPicture]).decode


def encode_pictures(pictures: Sequence[PlacedPicture]) -> bytes:
    """Return the payload of a request with these pictures, in the order of their places."""
    return msgspec.msgpack.encode(pictures) if pictures else b""


def decode_pictures(payload: bytes) -> list[PlacedPicture]:
    """Return the pictures of a request."""
    return _decode(payload) if payload else []
