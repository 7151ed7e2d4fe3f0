"""Computes log-mel features as transformers' WhisperFeatureExtractor does, piece by piece and without torch.

The fork server calls `load_extractor` for the workers. The runner calls it too, to compare the file with the model. The
file comes from a tenant, so all numbers are checked before they are used.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import read_object

Samples = npt.NDArray[np.float32]
FILE: Final = "preprocessor_config.json"
_FLOOR: Final = 1e-10  # smallest power in a mel band; smaller values are raised to it
_RANGE: Final = 8.0  # how far a band may be below the loudest band of the file, in powers of ten
_LIMITS: Final = {  # for each number in the file: transformers' default, minimum, maximum
    "feature_size": (80, 8, 256),
    "sampling_rate": (16_000, 16_000, 48_000),
    "hop_length": (160, 16, 4096),
    "chunk_length": (30, 1, 60),
    "n_fft": (400, 32, 512),
}


@dataclass(frozen=True)
class Extractor:
    """Computes one model's features: `num_mels` numbers for each frame of `hop` samples."""

    num_mels: int
    rate: int
    hop: int
    window_seconds: int
    n_fft: int

    @property
    def window_frames(self) -> int:
        """Return the number of frames in the window that the model's encoder reads."""
        return self.window_seconds * self.rate // self.hop

    @cached_property
    def _filters(self) -> npt.NDArray[np.float32]:
        return build_mel_filters(self.num_mels, self.n_fft, self.rate)

    @cached_property
    def _taper(self) -> npt.NDArray[np.float32]:
        return np.hanning(self.n_fft + 1)[:-1].astype(np.float32)

    def extract(self, pieces: Iterable[Samples]) -> tuple[npt.NDArray[np.float32], int]:
        """Return features (frames, num_mels) of a file's samples, and how many of these frames contain sound.

        A file that is shorter than a window is padded with silence. Every file needs at least n_fft samples.
        """
        half = self.n_fft // 2
        made: list[npt.NDArray[np.float32]] = []
        rest, num_samples = np.empty(0, np.float32), 0
        for piece in pieces:
            rest, num_samples = np.concatenate((rest, piece)), num_samples + len(piece)
            if not made:
                if len(rest) <= half:
                    continue
                rest = np.concatenate((rest[half:0:-1], rest))
                made.append(np.empty((0, self.num_mels), np.float32))
            rest = self._take_frames(rest, made)
        num_sound = num_samples // self.hop
        if (silence := self.window_seconds * self.rate - num_samples) > 0:
            rest = self._take_frames(np.concatenate((rest, np.zeros(silence, np.float32))), made)
        rest = self._take_frames(np.concatenate((rest, rest[-2 : -half - 2 : -1])), made)
        num_frames = max(num_samples, self.window_seconds * self.rate) // self.hop
        whole = np.concatenate(made)[:num_frames]
        np.maximum(whole, whole.max() - _RANGE, out=whole)
        whole += 4.0
        whole /= 4.0
        return whole, num_sound

    def _take_frames(self, samples: Samples, made: list[npt.NDArray[np.float32]]) -> Samples:
        """Append the features of all whole frames to `made`. Return the samples from the next frame on."""
        number = max(0, (len(samples) - self.n_fft) // self.hop + 1)
        if number:
            frames = np.lib.stride_tricks.sliding_window_view(samples, self.n_fft)[: number * self.hop : self.hop]
            spectrum = np.fft.rfft(frames * self._taper, axis=1)
            power = spectrum.real**2 + spectrum.imag**2
            made.append(np.log10(np.maximum(power.astype(np.float32) @ self._filters, _FLOOR)))
        return samples[number * self.hop :]


def build_mel_filters(num_mels: int, n_fft: int, rate: int) -> npt.NDArray[np.float32]:
    """Return Slaney's triangular filters (n_fft // 2 + 1, num_mels) up to 8 kHz, each of the same area."""
    edges = _to_hertz(np.linspace(0.0, _to_mel(8000.0), num_mels + 2))
    frequencies = np.linspace(0, rate // 2, n_fft // 2 + 1)
    slopes = edges[np.newaxis, :] - frequencies[:, np.newaxis]
    widths = np.diff(edges)
    filters = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return np.asarray(filters * (2.0 / (edges[2:] - edges[:-2])), dtype=np.float32)


def _to_mel(hertz: float) -> float:
    """Convert hertz to mels, which are linear up to 1 kHz, then logarithmic. Correct only from 1 kHz on."""
    return 15.0 + float(np.log(hertz / 1000.0)) * 27.0 / float(np.log(6.4))


def _to_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(mels < 15.0, 200.0 * mels / 3.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels - 15.0)))


def load_extractor(directory: Path) -> Extractor:
    """Read the extractor from the model's directory. Raises ModelError."""
    if not (directory / FILE).is_file():
        raise ModelError(f"{directory} has no {FILE}: save the model's feature extractor there (save_pretrained does)")
    content = read_object(directory / FILE)
    if (kind := content.get("feature_extractor_type", "WhisperFeatureExtractor")) != "WhisperFeatureExtractor":
        raise ModelError(f"{directory / FILE} is for a {str(kind)[:100]}; only WhisperFeatureExtractor is supported")
    numbers = {name: _read_number(directory, content, name) for name in _LIMITS}
    if content.get("dither") or content.get("do_normalize"):
        raise ModelError(f"{directory / FILE} has dither or do_normalize, which this engine does not compute")
    return Extractor(
        num_mels=numbers["feature_size"],
        rate=numbers["sampling_rate"],
        hop=numbers["hop_length"],
        window_seconds=numbers["chunk_length"],
        n_fft=numbers["n_fft"],
    )


def _read_number(directory: Path, content: dict[str, Any], name: str) -> int:
    default, low, high = _LIMITS[name]
    value = content.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{directory / FILE} has {name} {str(value)[:40]}; {low} to {high} is possible")
    return value
