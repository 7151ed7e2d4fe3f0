"""Audio files become mono samples at the model's rate, or one clear error each."""

import contextlib
import io
import struct
import wave

import numpy as np
import pytest
import soundfile
from tests.engine.speech_models import RATE, draw_sound, encode

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.tasks.transcribe.preparing.decoding import SECONDS_MAX, decode_audio

SOUND = draw_sound(0, 3.0)
WAV = encode(SOUND)


def decode(data: bytes) -> np.ndarray:
    return np.concatenate(list(decode_audio(data, RATE, "file")))


def tone(rate: int, seconds: float = 2.0, channels: int = 1) -> np.ndarray:
    samples = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate)
    return np.repeat(samples[:, np.newaxis], channels, axis=1)


@pytest.mark.parametrize(
    ("kind", "subtype", "most"),
    [
        ("WAV", "PCM_16", 1e-4), ("WAV", "PCM_U8", 1e-2), ("WAV", "FLOAT", 0.0), ("WAV", "ULAW", 0.02),
        ("WAVEX", "PCM_24", 1e-6), ("FLAC", "PCM_16", 1e-4), ("OGG", "VORBIS", 0.2),
    ],
)  # fmt: skip
def test_a_file_at_the_model_s_rate_keeps_its_samples(kind: str, subtype: str, most: float) -> None:
    found = decode(encode(SOUND, kind, subtype=subtype))
    assert len(found) == len(SOUND)
    assert np.abs(found - SOUND).max() <= most


@pytest.mark.parametrize("rate", [4_000, 8_000, 11_025, 22_050, 44_100, 48_000, 192_000])
@pytest.mark.parametrize("channels", [1, 2, 8])
def test_other_rates_and_channels_become_one_at_the_model_s_rate(rate: int, channels: int) -> None:
    found, expected = decode(encode(tone(rate, 2.0, channels), rate=rate)), tone(RATE)[:, 0]
    assert abs(len(found) - len(expected)) <= 8
    middle = slice(RATE // 2, -RATE // 2)
    assert np.abs(found[: len(expected)][middle] - expected[: len(found)][middle]).max() < 2e-3


@pytest.mark.parametrize(("kind", "subtype", "rate"), [("MP3", None, 44_100), ("OGG", "OPUS", 48_000)])
def test_lossy_files_keep_length_and_pitch(kind: str, subtype: str | None, rate: int) -> None:
    found = decode(encode(tone(rate), kind, rate, subtype))
    assert abs(len(found) / RATE - 2.0) < 0.15
    spectrum = np.abs(np.fft.rfft(found[:RATE]))
    assert spectrum.argmax() == pytest.approx(440, abs=1)


def wav_of(rate: int, num_frames: int, claimed: int | None = None) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(1)
        target.setframerate(rate)
        target.writeframes(bytes([128]) * num_frames)
    data = bytearray(file.getvalue())
    if claimed is not None:
        data[40:44] = struct.pack("<I", claimed)
    return bytes(data)


def nan_wav() -> bytes:
    return encode(np.full(RATE, np.nan, np.float32), subtype="FLOAT")


FLAC = encode(SOUND, "FLAC")
OGG = encode(SOUND, "OGG", subtype="VORBIS")
BAD = {
    "nothing": (b"", "is empty"),
    "a text": (b"hello, this is no sound at all", "is not an audio file that this engine recognises"),
    "an MP4": (b"\0\0\0\x20ftypM4A " + bytes(100), "is MP4 .* does not decode; send WAV, FLAC, MP3 or OGG"),
    "a WebM": (b"\x1a\x45\xdf\xa3" + bytes(100), "is WebM or Matroska, which this engine does not decode"),
    "AAC": (b"\xff\xf1" + bytes(100), "is AAC"),
    "AIFF": (encode(SOUND, "AIFF"), "is AIFF"),
    "an old codec": (encode(SOUND, subtype="MS_ADPCM"), "is WAV with MS_ADPCM"),
    "0 s": (wav_of(RATE, 0), "has 0 s of sound; the minimum is 0.1 s"),
    "a click": (wav_of(RATE, 100), "the minimum is 0.1 s"),
    "10 h": (wav_of(4_000, 144_000_000 // 20, None)[:44] + bytes([128]) * (4_000 * 1501), "broken|more than 1500 s"),
    "a long FLAC": (encode(np.zeros(4_000 * 1501), "FLAC", 4_000), "has more than 1500 s of sound"),
    "a cut WAV": (WAV[: len(WAV) // 2], "is a broken audio file: it has .* bytes of sound"),
    "a head of a WAV": (WAV[:40], "is a broken audio file: it has no sound"),
    "a cut FLAC": (FLAC[: len(FLAC) // 2], "is a broken audio file"),
    "a cut OGG": (OGG[: len(OGG) // 2], "is a broken audio file: its last page is missing"),
    "an OGG with a cut last page": (OGG[:-5], "is a broken audio file: its last page is cut off"),
    "an OGG with a cut head of its last page": (OGG[: OGG.rfind(b"OggS") + 27], "its last page is cut off"),
    "a damaged OGG": (OGG[:60] + bytes(400) + OGG[460:], "file: (?!.*BytesIO)"),
    "a head of an MP3": (b"\xff\xfb\x90\x00" + bytes(10), "is a broken audio file|s of sound"),
    "1 Hz": (wav_of(1, 10), "has 1 samples a second; 4000 to 192000 is possible"),
    "4 GHz": (
        wav_of(RATE, 9)[:24] + struct.pack("<I", 4_000_000_000) + wav_of(RATE, 9)[28:],
        "samples a second|broken",
    ),
    "9 channels": (encode(tone(RATE, 0.5, 9)), "has 9 channels; 1 to 8 is possible"),
    "above all scales": (encode(SOUND * np.float32(1e25), subtype="FLOAT"), "samples above 1.09951e.12, where 1 is"),
    "NaN": (nan_wav(), "samples that are not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_clear_error(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        decode(data)
    assert (caught.value.param, str(caught.value)[:5]) == ("file", "file ")


def test_unscaled_integers_are_sound() -> None:
    loud = SOUND * np.float32(2**31)
    assert np.array_equal(decode(encode(loud, subtype="FLOAT")), loud)


def test_a_wav_from_a_pipe_has_no_length() -> None:
    assert len(decode(wav_of(RATE, RATE, 0xFFFFFFFF))) == RATE


def test_random_damage_is_an_answer_or_a_sentence() -> None:
    random = np.random.default_rng(0)
    for data in (WAV, FLAC, OGG, encode(SOUND, "MP3")):
        for _ in range(12):
            damaged = bytearray(data)
            for place in random.integers(0, len(data), 20):
                damaged[place] = random.integers(256)
            with contextlib.suppress(InvalidRequest):
                decode(bytes(damaged))


def test_the_longest_file_is_read() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4_000 * int(SECONDS_MAX), np.int16), 4_000, format="FLAC")
    assert len(decode(file.getvalue())) == pytest.approx(RATE * SECONDS_MAX, abs=RATE)
