"""Reads the feature extractor and the generation_config.json of a speech model, and checks that they fit the model.

Used by `runner`. The files come from a tenant, so all numbers are checked before they are used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models import checks
from conveyor_engine.tasks.transcribe.execution.model import Tokens
from conveyor_engine.tasks.transcribe.facts import AudioFacts, SpeechTask
from conveyor_engine.tasks.transcribe.features import load_extractor

_TASKS: Final[tuple[SpeechTask, ...]] = ("transcribe", "translate")
_MEDIAN_WIDTH_MAX: Final = 63
_HEADS_MAX: Final = 32  # limit on the heads for alignment; OpenAI's models name 6 to 23


def describe_speech(directory: Path, model: Any, block_size: int) -> tuple[AudioFacts, Tokens]:
    """Return the facts of the model, and the token ids that limit its transcripts.

    block_size: tokens in a block of the KV cache. Raises ModelError if the files do not fit each other, or if
    generation_config.json lacks a value that transcripts with timestamps need.
    """
    extractor, config, generation = load_extractor(directory), model.config, model.generation_config
    positions = int(config.max_source_positions)
    if extractor.num_mels != config.num_mel_bins or extractor.window_frames != 2 * positions:
        made = f"{extractor.window_frames} frames of {extractor.num_mels} numbers"
        raise ModelError(
            f"its feature extractor makes {made}; the model needs {2 * positions} of {config.num_mel_bins}"
        )
    try:
        suppressed = Tokens.read(generation)
        names = getattr(generation, "lang_to_id", None) or {}
        languages = {str(name).strip("<|>"): int(token) for name, token in names.items()}
        known = getattr(generation, "task_to_id", None) or {}
        tasks = {task: int(known[task]) for task in _TASKS if task in known}
        if getattr(generation, "is_multilingual", None) is False:
            languages, tasks = {}, {}
        end = generation.eos_token_id
        previous = getattr(generation, "prev_sot_token_id", None) or _find_previous(generation)
        facts = AudioFacts(
            num_mels=extractor.num_mels,
            window_seconds=extractor.window_seconds,
            window_frames=extractor.window_frames,
            frames_per_position=2,
            window_cost=-(-positions // block_size) * block_size,
            languages=languages,
            tasks=tasks,
            start=int(generation.decoder_start_token_id),
            previous=None if previous is None else int(previous),
            end=int(end[0] if isinstance(end, list) else end),
            first_timestamp=suppressed.no_timestamps + 1,
            max_tokens=int(config.max_target_positions),
        )
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ModelError(
            f"{directory / 'generation_config.json'} lacks a value that Whisper needs ({checks.on_one_line(error)})"
        ) from error
    _check_tokens(facts, suppressed, int(config.vocab_size))
    return facts, suppressed


def _find_previous(generation: Any) -> int | None:
    """Return the token that begins a prompt of previous text, for a file without `prev_sot_token_id`.

    As in transformers, it is the second to last of the suppressed tokens. Returns None if there are fewer than two.
    """
    suppressed = list(generation.suppress_tokens or [])
    return int(suppressed[-2]) if len(suppressed) >= 2 else None


def _check_tokens(facts: AudioFacts, suppressed: Tokens, vocab_size: int) -> None:
    """Check that all tokens are in the vocabulary, and that timestamps come after the others. Raises ModelError."""
    named = [
        *facts.languages.values(), *facts.tasks.values(), *suppressed.suppressed, *suppressed.suppressed_first,
        facts.start, facts.end, facts.first_timestamp, facts.first_timestamp + (suppressed.max_first_timestamp or 0),
        facts.previous or 0,
    ]  # fmt: skip
    if wrong := [token for token in named if not 0 <= token < vocab_size]:
        raise ModelError(f"its generation_config.json names token {wrong[0]}, but the model has {vocab_size} tokens")
    if facts.languages and "transcribe" not in facts.tasks:
        raise ModelError("its generation_config.json has languages in lang_to_id, but no transcribe in task_to_id")
    if (suppressed.max_first_timestamp or 0) < 0:
        raise ModelError("its generation_config.json has a max_initial_timestamp_index below 0")
    if facts.end >= facts.first_timestamp or facts.max_tokens < 16:
        raise ModelError(
            "its files do not fit a Whisper model: timestamps must be the last tokens of the vocabulary, and "
            "max_target_positions must be at least 16"
        )


def read_alignment_heads(model: Any) -> Mapping[int, list[int]]:
    """Return, for each layer, the heads whose attention shows when a token is spoken. Raises ModelError.

    If the model names no heads, all heads in the last half of the layers are returned, as in OpenAI's library. If these
    are more than `_HEADS_MAX`, fewer of the last layers are used, with at most `_HEADS_MAX` heads together. The reason
    for the limit is that each head needs up to 2.7 MB for a window.
    """
    num_layers, num_heads = int(model.config.decoder_layers), int(model.config.decoder_attention_heads)
    named = getattr(model.generation_config, "alignment_heads", None)
    if not named:
        first = max(num_layers // 2, num_layers - max(1, _HEADS_MAX // num_heads))
        return {layer: list(range(num_heads))[:_HEADS_MAX] for layer in range(first, num_layers)}
    heads: dict[int, list[int]] = {}
    try:
        pairs = {(int(layer), int(head)) for layer, head in named}
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"its generation_config.json has alignment_heads that are not pairs: {named!r:.80}") from error
    if len(pairs) > _HEADS_MAX:
        raise ModelError(f"its generation_config.json has {len(pairs)} alignment_heads; the limit is {_HEADS_MAX}")
    for layer, head in sorted(pairs):
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            raise ModelError(f"its generation_config.json has an unknown alignment head [{layer}, {head}]")
        heads.setdefault(layer, []).append(head)
    return heads


def read_median_width(model: Any) -> int:
    """Return the width of alignment's median filter in encoder positions: an odd number from 1 to 63."""
    return min(max(int(model.config.median_filter_width), 1), _MEDIAN_WIDTH_MAX) | 1
