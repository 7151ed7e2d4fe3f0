"""openai for Python, with a service that transcribes."""

import warnings
from pathlib import Path

from checks import MODEL, URL, run
from openai import BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
FILE = Path(__file__).parents[3] / "examples" / "words.mp3"
warnings.filterwarnings("ignore", category=DeprecationWarning)  # the client marks its translations as deprecated


def transcribe(**options: object) -> object:
    return client.audio.transcriptions.create(**{"model": MODEL, "file": FILE, **options})


def json() -> None:
    answer = transcribe()
    assert len(answer.text.split()) > 1
    assert answer.usage.type == "duration"
    assert answer.usage.seconds > 0


def verbose_json() -> None:
    answer = transcribe(response_format="verbose_json", timestamp_granularities=["segment"])
    assert "".join(segment.text for segment in answer.segments).strip() == answer.text == transcribe().text
    times = [time for segment in answer.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert 0 < times[-1] <= answer.duration


def subtitles() -> None:
    words = transcribe().text.split()
    for form, has_times in (("srt", True), ("vtt", True), ("text", False)):
        answer = transcribe(response_format=form)
        assert all(word in answer for word in words)
        assert (" --> " in answer) == has_times


def stream() -> None:
    *deltas, done = transcribe(stream=True)
    assert [event.type for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas).split() == done.text.split() == transcribe().text.split()


def translations() -> None:
    assert client.audio.translations.create(model=MODEL, file=FILE).text
    answer = client.audio.translations.create(model=MODEL, file=FILE, response_format="verbose_json")
    assert answer.segments


def errors() -> None:
    for wrong, kind in (
        ({"model": "no-such"}, NotFoundError),
        ({"temperature": 2}, BadRequestError),
        ({"file": ("x.mp3", b"no audio")}, BadRequestError),
    ):
        try:
            transcribe(**wrong)
        except kind as error:
            named = error.param
        else:
            named = "nothing: it was accepted"
        assert named in wrong, named


run(json, verbose_json, subtitles, stream, translations, errors)
