"""The model that is trained here to understand tones, as the engine serves it."""

from pathlib import Path
from random import Random

import pytest
from tests.engine.processes import EngineServer

from e2e.demo.tasks import TASKS
from e2e.demo_model import SPEECH, demo_model_directory
from e2e.demo_model.tones import BEAT_SECONDS, WORDS_IN_FILE, draw_phrases, encode_wav, play, write_text

PATH = "/v1/audio/transcriptions"


@pytest.mark.nightly  # trains for minutes where the cache has no model
@pytest.mark.timeout(1800)
def test_unknown_words_times_and_languages_are_reported(tmp_path: Path) -> None:
    draw, num_right = Random("unheard"), 0
    with EngineServer(tmp_path, demo_model_directory(SPEECH)) as engine:
        engine.wait_ready()

        def transcribe(data: bytes, **fields: str) -> dict[str, object]:
            answer = engine.client.post(
                engine.url + PATH, data={"response_format": "verbose_json", **fields}, files={"file": ("x", data)}
            )
            assert answer.status_code == 200, answer.text
            document: dict[str, object] = answer.json()
            return document

        for number in range(20):
            language, num_beats = draw.choice(("en", "de")), draw.choice((8, 20, 40))
            phrases = draw_phrases(num_beats, draw)
            data = encode_wav(play(phrases, language, phrases[-1].end + 1, draw))
            transcript = transcribe(data)
            segments = transcript["segments"]
            assert isinstance(segments, list)
            times = [(each["start"], each["end"]) for each in segments]
            num_right += (
                transcript["text"] == write_text(phrases, language).strip()
                and transcript["language"] == {"en": "english", "de": "german"}[language]
                and times == [(phrase.start * BEAT_SECONDS, phrase.end * BEAT_SECONDS) for phrase in phrases]
            )
            if number == 0:
                answer = engine.client.post(engine.url + "/v1/audio/translations", files={"file": ("x", data)})
                assert answer.json()["text"] == write_text(phrases, "en").strip()
        assert num_right >= 16
        task = TASKS["transcribe"]
        assert transcribe(Path(task.file).read_bytes())["text"] == WORDS_IN_FILE
        answer = task.post(engine.url, task.body)
        assert task.describe(answer.json())[0] == "english"
