"""Train a small Whisper that understands tones, in a minute or two. Called by `e2e.demo_model`.

Its windows have 6 s, for speed. The vectors of timestamps begin as those of the encoder's positions, so that attention
finds the place of a timestamp at once; everything else is learned.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from e2e.demo_model.bert import make_readable
from e2e.demo_model.tones import BEAT_SECONDS, WORDS, Phrase, draw_phrases, play

WINDOW_SECONDS = 6
STEPS = 500
LEARNING_RATE = 3e-3
FILES = 16  # per step
_TIMES = [f"<|{number * 0.02:.2f}|>" for number in range(WINDOW_SECONDS * 50 + 1)]
_SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
_BEATS = round(WINDOW_SECONDS / BEAT_SECONDS)


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer, feature extractor) in `directory`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    draw = random.Random(0)
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    model = WhisperForConditionalGeneration(build_config(ids)).train()
    with torch.no_grad():
        first = ids["<|0.00|>"]
        places = model.model.encoder.embed_positions.weight
        model.model.decoder.embed_tokens.weight[first : first + len(places)] = places * 0.5
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_SECONDS)

    def find_loss() -> torch.Tensor:
        files = [_draw_file(draw, tokenizer, ids) for _ in range(FILES)]
        features = extractor([samples for samples, _ in files], sampling_rate=16_000, return_tensors="pt")
        sounds = features["input_features"]
        if draw.random() < 0.3:  # as transformers fills the last window of a long file
            sounds[:, :, (cut := 50 * draw.randrange(2, _BEATS)) :] = 0.0
            files = [(samples, _cut(labels, ids, cut)) for samples, labels in files]
        longest = max(len(labels) for _, labels in files)
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in files])
        logits = model(input_features=sounds, decoder_input_ids=labels[:, :-1].clamp(min=0), use_cache=False).logits
        targets = labels[:, 1:].clone()
        targets[:, 1] = -100  # the task is given
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    _learn(model, find_loss, progress)
    model.generation_config = build_generation_config(ids)
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extractor.save_pretrained(directory)
    make_readable(directory)


def _learn(model: torch.nn.Module, find_loss: Callable[[], torch.Tensor], progress: Callable[[str], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    began = time.monotonic()
    for step in range(1, STEPS + 1):
        loss = find_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % 50 == 0:
            progress(f"step {step}/{STEPS}, loss {loss.item():.2f}, {time.monotonic() - began:.0f} s")


def _draw_file(
    draw: random.Random, tokenizer: PreTrainedTokenizerFast, ids: dict[str, int]
) -> tuple[np.ndarray, list[int]]:
    """The sound of a window, and all tokens of its transcript."""
    language = draw.choice(tuple(WORDS))
    phrases = draw_phrases(draw.choice((_BEATS, _BEATS, draw.randrange(1, _BEATS))), draw)
    samples = play(phrases, language, _BEATS, draw)
    translates = draw.random() < 0.2
    tokens = [ids["<|startoftranscript|>"], ids[f"<|{language}|>"]]
    tokens.append(ids["<|translate|>" if translates else "<|transcribe|>"])
    output_language = "en" if translates else language
    for phrase in phrases:
        text = "".join(f" {WORDS[output_language][word]}" for word in phrase.words)
        tokens += _write(phrase, tokenizer.encode(text, add_special_tokens=False), ids)
    return samples, [*tokens, ids["<|endoftext|>"]]


def _write(phrase: Phrase, text: list[int], ids: dict[str, int]) -> list[int]:
    """Of a phrase that the window cuts only the start is told."""
    if phrase.end > _BEATS:
        return [ids[_name_time(phrase.start)]]
    return [ids[_name_time(phrase.start)], *text, ids[_name_time(phrase.end)]]


def _cut(labels: list[int], ids: dict[str, int], frames: int) -> list[int]:
    """The labels up to a time. A phrase that goes on at that time only begins."""
    first, limit = ids["<|0.00|>"], ids["<|0.00|>"] + frames // 2
    kept = labels[:3]
    segment: list[int] = []
    for token in labels[3:-1]:
        segment.append(token)
        if token >= first and len(segment) > 1:
            if segment[0] < limit:
                kept += segment if token <= limit else segment[:1]
            segment = []
    if segment and segment[0] < limit:
        kept += segment[:1]
    return [*kept, labels[-1]]


def _name_time(beat: int) -> str:
    return f"<|{beat * BEAT_SECONDS:.2f}|>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and words, then Whisper's special tokens and times."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" " + " ".join(words) for words in WORDS.values()] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in _TIMES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def build_config(ids: dict[str, int]) -> WhisperConfig:
    end = ids["<|endoftext|>"]
    return WhisperConfig(
        vocab_size=len(ids),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=WINDOW_SECONDS * 50,
        max_target_positions=64,
        init_std=0.08,  # otherwise the positions would drown the sound
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def build_generation_config(ids: dict[str, int]) -> GenerationConfig:
    """With the names and the meaning that Whisper's own files have."""
    end = ids["<|endoftext|>"]
    hidden = ("<|startoftranscript|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|en|>", "<|de|>")
    return GenerationConfig(
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_length=64,
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": ids[f"<|{language}|>"] for language in WORDS},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_initial_timestamp_index=50,
        return_timestamps=False,
        suppress_tokens=sorted(ids[name] for name in hidden),
        begin_suppress_tokens=[end],
    )
