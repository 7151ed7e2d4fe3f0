"""Tokens and segments equal those of transformers' `generate`, greedy and in float32, for whole files in any batch.

The mutation tests at the end show that the comparison can fail.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.engine.embedding_cores import make_core
from tests.engine.image_models import save_image_model
from tests.engine.speech_models import RATE, draw_sound, save_speech_model
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.transcribe.execution.files import describe_speech, read_alignment_heads
from conveyor_engine.tasks.transcribe.execution.model import TranscriptRules
from conveyor_engine.tasks.transcribe.execution.runner import SpeechRunner
from conveyor_engine.tasks.transcribe.execution.whisper import Decoder
from conveyor_engine.tasks.transcribe.facts import AudioFacts
from conveyor_engine.tasks.transcribe.features import load_extractor
from conveyor_engine.tasks.transcribe.preparing import PreparedSpeech
from conveyor_engine.tasks.transcribe.serving.transcript import Transcript
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.worker import Part

SECONDS = (7.3, 13.0, 31.0, 6.01, 20.5)
SOUNDS = [draw_sound(number, seconds) for number, seconds in enumerate(SECONDS)]
Segment = tuple[float, float, list[int]]


class Speech:
    """A tiny model, and the segments that transformers finds in all sounds."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.model = save_speech_model(directory, **changes)
        self.tokenizer = Tokenizer(directory)

    def expect(self, sound: npt.NDArray[np.float32], **how: Any) -> list[Segment]:
        return generate(self.model, self.directory, sound, **how)

    def make_core(self, **changes: Any) -> EngineCore:
        return make_core(self.directory, **({"max_num_batched_tokens": None, "batching_mode": "continuous"} | changes))

    def transcribe(self, core: EngineCore, sounds: Sequence[npt.NDArray[np.float32]], **how: Any) -> list[Transcript]:
        """The files' transcripts. All begin at once."""
        transcripts = [self.open(core, number, sound, **how) for number, sound in enumerate(sounds)]
        by_id = {}
        for number, transcript in enumerate(transcripts):
            by_id[f"{number}"] = transcript
            add(core, transcript.build_part())
        while core.has_unfinished():
            for output in core.step(0.0):
                number, _, _ = output.request_id.partition("-")
                if (part := by_id[number].follow(output)) is not None:
                    add(core, part)
        return transcripts

    def open(self, core: EngineCore, number: int, sound: npt.NDArray[np.float32], **how: Any) -> Transcript:
        facts = AudioFacts.read(core.facts)
        features, num_frames = load_extractor(self.directory).extract([sound])
        language, prompt = how.get("language"), how.get("prompt", [])
        tokens = [*([facts.previous] if prompt else []), *prompt, facts.start]
        tokens += [facts.languages.get(language, 0), facts.tasks[how.get("task", "transcribe")]]
        prepared = PreparedSpeech(
            id=str(number), arrival_time=0.0, deadline=np.inf, level=0, ignored_fields=0, task="transcribe",
            language=language, tokens=tokens, language_at=None if language else len(tokens) - 2,
            features=features.tobytes(), num_frames=num_frames, seconds=len(sound) / RATE, response_format="json",
            stream=False, temperature=how.get("temperature", 0.0), seed=how.get("seed"),
            wants_words=how.get("words", False),
        )  # fmt: skip
        return Transcript(prepared, facts, self.tokenizer)


def generate(
    model: WhisperForConditionalGeneration, directory: Path, sound: npt.NDArray[np.float32], **how: Any
) -> list[Segment]:
    extractor = WhisperFeatureExtractor.from_pretrained(directory)
    is_long = len(sound) > extractor.n_samples
    fill = {"truncation": False, "padding": "longest"} if is_long else {}
    features = extractor(sound, sampling_rate=RATE, return_tensors="pt", **fill).input_features
    with torch.inference_mode():
        found = model.generate(
            features, **({"task": "transcribe"} | how), return_timestamps=True, return_segments=True, temperature=0.0
        )
    return [
        (round(float(each["start"]), 3), round(float(each["end"]), 3), each["tokens"].tolist())
        for each in found["segments"][0]
    ]


def add(core: EngineCore, part: Part) -> None:
    message = to_engine_decoder.decode(part.add[4:])
    assert isinstance(message, Add)
    for request in message.requests(0.0):
        core.add_request(request)


def read(transcript: Transcript) -> list[Segment]:
    return [
        (round(each.segment.start, 3), round(each.segment.end, 3), each.segment.tokens) for each in transcript.segments
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return Speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def expected(tiny: Speech) -> list[list[Segment]]:
    return [tiny.expect(sound) for sound in SOUNDS]


OTHER_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("none", "dynamic")]


@pytest.mark.parametrize("mode", ["static", "continuous", *OTHER_MODES])
def test_whole_files_are_transcribed_as_by_transformers(tiny: Speech, expected: list[list[Segment]], mode: str) -> None:
    core = tiny.make_core(batching_mode=mode)
    assert isinstance(core.executor, SpeechRunner)
    assert [read(each) for each in tiny.transcribe(core, SOUNDS)] == expected
    assert sum(map(len, expected)) > 25
    assert len({token for each in expected for _, _, tokens in each for token in tokens}) > 40


def test_windows_of_several_files_share_steps(tiny: Speech) -> None:
    core = tiny.make_core(max_num_seqs=len(SOUNDS))
    transcripts = tiny.transcribe(core, SOUNDS)
    assert core.stats().num_steps < core.stats().generation_tokens / 2
    assert core.stats().kv_cache_usage == 0.0
    assert {each.language for each in transcripts} <= {"de", "en"}


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_windows_that_are_preempted_give_the_same(
    tiny: Speech, expected: list[list[Segment]], backend: str, overlap: bool
) -> None:
    """Two windows have places in the KV cache, and not for their longest transcripts."""
    core = tiny.make_core(
        max_num_seqs=len(SOUNDS), num_kv_blocks=41, block_size=16, attention_backend=backend, overlap=overlap
    )
    assert [read(each) for each in tiny.transcribe(core, SOUNDS)] == expected
    assert core.stats().num_preemptions > 0


def test_tokens_are_drawn_above_temperature_0(tiny: Speech, expected: list[list[Segment]]) -> None:
    drawn = [tiny.transcribe(tiny.make_core(), SOUNDS[:2], temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    one, again, other = [[read(transcript) for transcript in each] for each in drawn]
    assert one == again != other
    assert one != expected[:2]


class _Reader:
    """The part of transformers' WhisperTokenizer that its grouping of words uses."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer, self.eos_token_id, self.language = tokenizer, end, "english"

    def decode(self, tokens: list[int], **_: Any) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("heads", [[[0, 1], [1, 0], [1, 1]], None])
def test_words_have_the_times_of_transformers(tmp_path: Path, heads: list[list[int]] | None) -> None:
    tiny = Speech(tmp_path)
    tiny.model.generation_config.alignment_heads = heads or [[1, head] for head in range(4)]
    if heads is not None:
        tiny.model.generation_config.save_pretrained(tmp_path)
    core, sounds = tiny.make_core(), [SOUNDS[1], SOUNDS[3]]
    transcripts = tiny.transcribe(core, sounds, words=True, language="en")
    extractor, end = WhisperFeatureExtractor.from_pretrained(tmp_path), AudioFacts.read(core.facts).end
    number = 0
    for transcript, sound in zip(transcripts, sounds, strict=True):
        made = extractor(
            sound,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
        with torch.inference_mode():
            found = tiny.model.generate(
                made.input_features, attention_mask=made.attention_mask, language="en", task="transcribe",
                return_timestamps=True, return_segments=True, return_token_timestamps=True, temperature=0.0,
            )  # fmt: skip
        expected = []
        for segment in found["segments"][0]:
            tokens, times = segment["tokens"].tolist(), segment["token_timestamps"].tolist()
            places = [place for place, token in enumerate(tokens) if token < end]
            words, _, indices = _combine_tokens_into_words(
                _Reader(tiny.tokenizer, end), [tokens[place] for place in places]
            )
            for word, index in zip(words, indices, strict=True):
                after = times[min(places[index[-1]] + 1, len(times) - 1)]
                expected.append((word.strip(), round(times[places[index[0]]], 2), round(after, 2)))
        assert [(each.text, round(each.start, 2), round(each.end, 2)) for each in transcript.words] == expected
        number += len(expected)
    assert number > 5


def test_text_of_closed_segments_comes_before_the_window_ends(tiny: Speech) -> None:
    core = tiny.make_core()
    transcript = tiny.open(core, 0, SOUNDS[1])
    add(core, transcript.build_part())
    texts = []
    while core.has_unfinished():
        for output in core.step(0.0):
            if (part := transcript.follow(output)) is not None:
                add(core, part)
            texts.append(transcript.text)
    assert len(set(texts)) > transcript.num_windows + 2
    assert all(transcript.text.startswith(text) for text in texts)


def test_language_task_and_prompt_are_those_of_transformers(tiny: Speech) -> None:
    core, prompt = tiny.make_core(), tiny.tokenizer.encode(" rot weiß", 9)
    facts = AudioFacts.read(core.facts)
    (transcript,) = tiny.transcribe(core, SOUNDS[1:2], language="de", task="translate", prompt=prompt)
    ids = torch.tensor([facts.previous, *prompt])
    assert read(transcript) == tiny.expect(SOUNDS[1], language="de", task="translate", prompt_ids=ids)
    assert transcript.language == "de"
    assert read(transcript) != tiny.expect(SOUNDS[1], language="en", task="translate", prompt_ids=ids)


def test_a_file_that_is_shorter_than_a_window_ends_with_its_sound(tiny: Speech) -> None:
    """Transformers goes on into the silence that fills its window."""
    (transcript,) = tiny.transcribe(tiny.make_core(), [draw_sound(9, 2.5)])
    expected = tiny.expect(draw_sound(9, 2.5))
    (first, *_) = expected
    assert read(transcript)[: len(read(transcript)) - 1] == expected[: len(read(transcript)) - 1]
    assert transcript.segments[0].segment.tokens[:3] == first[2][:3]


def test_warm_up_runs_the_largest_batch(tiny: Speech) -> None:
    core = tiny.make_core(warmup=True)
    assert core.warmup_seconds > 0
    facts = AudioFacts.read(core.facts)
    assert core.facts.max_model_len == facts.window_cost + facts.max_tokens
    assert core.facts.max_num_batched_tokens == core.facts.max_num_seqs * core.facts.max_model_len


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "generate"}, "the model transcribes speech .*set `task: transcribe`"),
    ],
)
def test_settings_of_text_are_refused(tiny: Speech, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny.make_core(**changes)


def test_a_model_of_another_task_is_refused(tmp_path: Path) -> None:
    save_image_model("vit", tmp_path)
    with pytest.raises(ConfigError, match="the model classifies images"):
        make_core(tmp_path, task="transcribe", max_num_batched_tokens=None)


def test_files_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    save_speech_model(tmp_path)
    WhisperFeatureExtractor(chunk_length=30).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="makes 3000 frames of 80 numbers; the model needs 600 of 80"):
        make_core(tmp_path, max_num_batched_tokens=None)
    WhisperFeatureExtractor(chunk_length=6).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=1, decoder_start_token_id=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"generation_config\.json lacks a value that Whisper needs"):
        make_core(tmp_path, max_num_batched_tokens=None)


def test_a_large_model_without_alignment_heads_has_a_bounded_number(tiny: Speech) -> None:
    model = copy.copy(tiny.model)
    model.generation_config = GenerationConfig()
    model.config = WhisperConfig(decoder_layers=32, decoder_attention_heads=20)
    assert read_alignment_heads(model) == {31: list(range(20))}
    model.config = WhisperConfig(decoder_layers=4, decoder_attention_heads=6)
    model.generation_config.alignment_heads = []
    assert read_alignment_heads(model) == {layer: list(range(6)) for layer in (2, 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_to_id": None}, "no transcribe in task_to_id"),
        ({"task_to_id": {"translate": 306}}, "no transcribe in task_to_id"),
        ({"max_initial_timestamp_index": -1}, "max_initial_timestamp_index below 0"),
        ({"max_initial_timestamp_index": "late"}, "lacks a value that Whisper needs"),
        ({"lang_to_id": {"<|en|>": np.inf}}, "lacks a value that Whisper needs"),
        ({"prev_sot_token_id": "before"}, "lacks a value that Whisper needs"),
        ({"begin_suppress_tokens": ["x"]}, "lacks a value that Whisper needs"),
    ],
)
def test_tokens_that_no_request_could_use_are_refused(tiny: Speech, changes: dict[str, Any], message: str) -> None:
    model = copy.copy(tiny.model)
    model.generation_config = copy.deepcopy(model.generation_config)
    for name, value in changes.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ModelError, match=message):
        describe_speech(tiny.directory, model, 16)


@pytest.mark.parametrize("heads", [[[9, 0]], [[0, -1]], [[np.inf, 0]], ["x"], 7, [[0, head] for head in range(33)]])
def test_alignment_heads_that_are_no_heads_are_refused(tiny: Speech, heads: Any) -> None:
    model = copy.copy(tiny.model)
    model.generation_config = GenerationConfig(alignment_heads=heads)
    with pytest.raises(ModelError, match=r"generation_config\.json has"):
        read_alignment_heads(model)


@pytest.mark.parametrize("broken", ["sound", "rules"])
def test_the_comparison_can_fail(
    tiny: Speech, expected: list[list[Segment]], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "sound":
        monkeypatch.setattr(Decoder, "write_sound", lambda *_: None)
    else:
        monkeypatch.setattr(TranscriptRules, "accept", lambda *_: None)
    transcripts = tiny.transcribe(tiny.make_core(max_num_seqs=5), SOUNDS)
    assert [read(each) for each in transcripts] != expected
