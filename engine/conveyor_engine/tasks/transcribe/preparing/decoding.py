"""Decodes one audio file into mono samples at the model's rate, within limits. Runs in worker processes only.

The bytes are not trusted. libsndfile decodes them piece by piece, and soxr resamples each piece, so memory does not
depend on the length of a file. A file is rejected at once if its header says that it is too long. Otherwise it is
rejected as soon as it has too many samples.
"""

import io
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.tasks.transcribe.preparing.containers import check_container

SECONDS_MAX: Final = 1500.0  # limit for one file, as in OpenAI's newer models
SECONDS_MIN: Final = 0.1
_RATES: Final = (4_000, 192_000)
_CHANNELS_MAX: Final = 8
_LOUDEST: Final = 2.0**40  # far above unscaled integer samples; above it, the features' squares would overflow
_PIECE_SECONDS: Final = 10.0
_FORMATS: Final = {  # the codecs of each format; libsndfile has more formats and codecs, old and hardly used
    "WAV": ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    "WAVEX": ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    "FLAC": ("PCM_S8", "PCM_16", "PCM_24"),
    "MP3": ("MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"),
    "OGG": ("VORBIS", "OPUS"),
}
Samples = npt.NDArray[np.float32]


def decode_audio(data: bytes, rate: int, param: str) -> Iterator[Samples]:
    """Yield the file's sound as pieces of mono samples, `rate` samples per second. Raises InvalidRequest."""
    check_container(data, param)
    try:
        yield from _resample(data, rate, param)
    except (soundfile.SoundFileError, EOFError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        text = error.error_string if isinstance(error, soundfile.LibsndfileError) else str(error)
        what = " ".join(text.split())[:200].removesuffix(".") or type(error).__name__
        raise _broken(param, what) from None


def _resample(data: bytes, rate: int, param: str) -> Iterator[Samples]:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        _check_header(file, param)
        of_file = int(file.samplerate)
        stream = None if of_file == rate else soxr.ResampleStream(of_file, rate, 1, dtype="float32", quality="HQ")
        num_frames = 0
        while len(piece := file.read(int(_PIECE_SECONDS * of_file), dtype="float32", always_2d=True)):
            num_frames += len(piece)
            _check_length(num_frames / of_file, param)
            mono = np.ascontiguousarray(piece.mean(axis=1, dtype=np.float32))
            if not np.isfinite(mono).all():
                raise _broken(param, "it has samples that are not finite (NaN or infinity)")
            if np.abs(mono).max() > _LOUDEST:
                raise _broken(param, f"it has samples above {_LOUDEST:g}, where 1 is full scale")
            yield mono if stream is None else stream.resample_chunk(mono)
        if file.format == "FLAC" and num_frames < file.frames:
            raise _broken(param, f"it ends after {num_frames} of {file.frames} samples")
        if num_frames < SECONDS_MIN * of_file:
            raise InvalidRequest(
                f"{param} has {num_frames / of_file:g} s of sound; the minimum is {SECONDS_MIN:g} s", param=param
            )
        if stream is not None:
            yield stream.resample_chunk(np.empty(0, np.float32), last=True)


def _check_header(file: soundfile.SoundFile, param: str) -> None:
    if file.subtype not in _FORMATS.get(file.format, ()):
        raise InvalidRequest(
            f"{param} is {file.format} with {file.subtype}; send WAV (PCM), FLAC, MP3 or OGG (Vorbis, Opus)",
            param=param,
        )
    low, high = _RATES
    if not low <= file.samplerate <= high:
        raise InvalidRequest(
            f"{param} has {file.samplerate} samples a second; {low} to {high} is possible", param=param
        )
    if not 1 <= file.channels <= _CHANNELS_MAX:
        raise InvalidRequest(f"{param} has {file.channels} channels; 1 to {_CHANNELS_MAX} is possible", param=param)
    if file.format != "MP3" and file.frames < 2**62:  # an MP3's header may contain only an estimate
        _check_length(file.frames / file.samplerate, param)


def _check_length(seconds: float, param: str) -> None:
    if seconds > SECONDS_MAX:
        raise InvalidRequest(
            f"{param} has more than {SECONDS_MAX:g} s of sound, the limit of a request; send it in parts", param=param
        )


def _broken(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is a broken audio file: {what}", param=param)
