"""Speech of tones: what `demo-audio` learns, and what the demo lets it hear.

A word is a tone of half a second, whose pitch is the word and whose timbre is the language. Words form phrases of one
or two, with pauses of half a second. So ends, times and languages are known without a recording.
"""

import io
import random
import wave
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RATE: Final = 16_000
BEAT_SECONDS: Final = 0.5  # of a word, and of a pause
WORDS: Final[dict[str, tuple[str, ...]]] = {
    "en": ("red", "green", "blue", "black", "white", "yellow"),
    "de": ("rot", "grün", "blau", "schwarz", "weiß", "gelb"),
}
WORDS_IN_FILE: Final = "red green blue yellow white black green"  # of examples/words.mp3
_PITCHES: Final = (300.0, 440.0, 640.0, 940.0, 1380.0, 2000.0)  # hertz, one for each word
_OVERTONES: Final = {"en": (1.0,), "de": (0.7, 0.4, 0.4)}  # the strength of the tone and of its multiples


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words that follow each other without a pause, and the beat at which they begin."""

    start: int
    words: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.words)


def draw_phrases(num_beats: int, draw: random.Random) -> list[Phrase]:
    """Phrases for so many beats. The last one may end later."""
    phrases: list[Phrase] = []
    beat = draw.randrange(3)
    while beat < num_beats:
        phrase = Phrase(beat, tuple(draw.randrange(len(_PITCHES)) for _ in range(draw.choice((1, 2, 2)))))
        phrases.append(phrase)
        beat = phrase.end + draw.choice((1, 1, 1, 2))
    return phrases


def play(phrases: list[Phrase], language: str, num_beats: int, draw: random.Random) -> npt.NDArray[np.float32]:
    """The sound of so many beats at 16 kHz, with a little noise."""
    per_beat = round(BEAT_SECONDS * RATE)
    times = np.arange(per_beat) / RATE
    fade = np.minimum(1.0, np.minimum(times, times[::-1]) / 0.02)
    noise = np.random.default_rng(draw.randrange(2**32)).normal(0, draw.uniform(0.0005, 0.004), num_beats * per_beat)
    samples = noise.astype(np.float32)
    loudness = draw.uniform(0.15, 0.4)
    for phrase in phrases:
        for number, word in enumerate(phrase.words):
            first = (phrase.start + number) * per_beat
            tone = sum(
                strength * np.sin(2 * np.pi * _PITCHES[word] * (multiple + 1) * times)
                for multiple, strength in enumerate(_OVERTONES[language])
            )
            room = samples[first : first + per_beat]
            room += (loudness * fade * tone).astype(np.float32)[: len(room)]
    return samples


def write_text(phrases: list[Phrase], language: str) -> str:
    """What is said, as a transcript."""
    return "".join(f" {WORDS[language][word]}" for phrase in phrases for word in phrase.words)


def encode_wav(samples: npt.NDArray[np.float32], rate: int = RATE) -> bytes:
    """The samples as a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(rate)
        target.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()
