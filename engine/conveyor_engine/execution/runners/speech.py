"""Runs plans of a model that transcribes speech: features of windows -> the encoder -> tokens, step by step.

Built once by `build`, in place of `generate`: it too is the `loop.executor` of one device. It keeps nothing between
steps: a step computes the whole transcripts of its windows. Workers have made the features.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.audio.features import load_extractor
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution.largest_step import measure_step
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.kinds import SPEECH
from conveyor_engine.execution.models.speech import Rules, Transcriber
from conveyor_engine.execution.placement import Placement, free_cached_memory
from conveyor_engine.execution.start import Progress, Start
from conveyor_engine.wire.audio import AudioFacts, SpeechTask, Window, WindowResult
from conveyor_engine.wire.step import StepPlan, StepResult

_TASKS: Final[tuple[SpeechTask, ...]] = ("transcribe", "translate")


class SpeechRunner:
    """One model of speech on one device, ready to run after construction."""

    extra_warmup_tokens = 0
    graph_sizes: Sequence[int] = ()

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress = lambda _: None) -> None:
        """Loads the model. Raises ConfigError or ModelError."""
        _check_settings(config)
        start = Start(config, placement, progress, SPEECH)
        self.device, self._dtype = start.device, start.dtype
        self.model: Any = start.load()
        self._of_task, rules = _describe(Path(config.model), self.model)
        self._transcriber = Transcriber(self.model, self._of_task, rules, self.device)
        seconds = self._of_task.window_seconds
        progress(f"event=model_loaded window_seconds={seconds} languages={len(self._of_task.languages)}")
        self.facts = start.facts(
            self.model,
            max_model_len=seconds,
            attention_backend="model",
            max_num_batched_tokens=config.max_num_batched_tokens or start.max_num_seqs * seconds,
            of_task=self._of_task.encode(),
        )
        self._try(progress)

    def _try(self, progress: Progress) -> None:
        """Raises ModelError if the largest step does not fit beside the weights, or the model's parts do not fit."""
        windows = [Window(tokens=[self._of_task.start], features=b"", max_new_tokens=4)]
        if self.device.type == "cuda":
            number = max(1, min(self.facts.max_num_seqs, self.facts.max_num_batched_tokens // self.facts.max_model_len))
            largest = Window(tokens=[self._of_task.start], features=b"", max_new_tokens=None, never_ends=True)
            settings = "`max_num_seqs` or `max_num_batched_tokens`"
            run = lambda: self._compute([largest] * number)  # noqa: E731
            step_bytes = measure_step(self.device, f"{number} windows", settings, run)
            progress(f"event=largest_step_fits mib={step_bytes / 2**20:.0f}")
        try:
            with torch.inference_mode():
                self._compute(windows)
        except checks.TRANSFORMERS_ERRORS as error:
            checks.raise_if_of_device(error)
            raise ModelError(f"the model cannot transcribe: {checks.on_one_line(error)}") from error

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begins a step: encodes the window of each row, which the plan brings. No row samples by itself.

        What the returned function returns chooses the tokens. On a GPU it waits for the device every few tokens.
        """
        brought = {row.row: row.payload for row in plan.admitted}
        windows = [Window.read(brought[row]) for row in plan.rows]
        with torch.inference_mode():
            encoded = self._encode(windows)

        def read() -> StepResult:
            with torch.inference_mode():
                results = self._transcriber.transcribe(encoded, windows)
            payloads = [result.encode() if np.isfinite(result.avg_logprob) else b"" for result in results]
            return StepResult(plan.number, [], payloads=payloads)

        return lambda _: read

    def _compute(self, windows: Sequence[Window]) -> list[WindowResult]:
        return self._transcriber.transcribe(self._encode(windows), windows)

    def _encode(self, windows: Sequence[Window]) -> torch.Tensor:
        """-> (windows, positions, hidden)."""
        facts = self._of_task
        shape = len(windows), facts.window_frames, facts.num_mels
        batch = torch.zeros(shape, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        rows: npt.NDArray[Any] = batch.view(len(windows), -1).numpy()
        for number, window in enumerate(windows):
            numbers = np.frombuffer(window.features, dtype=np.float32)
            rows[number, : len(numbers)] = numbers
        features = batch.to(self.device, non_blocking=True).to(self._dtype).transpose(1, 2)
        encoded: torch.Tensor = self.model.model.encoder(features).last_hidden_state
        return encoded

    def free_memory(self) -> None:
        """Returns cached memory to the device after a failed step. Raises if the device is broken."""
        free_cached_memory(self.device)


def _check_settings(config: EngineConfig) -> None:
    """Refuses settings that apply to text only. Raises ConfigError."""
    if config.max_model_len is not None:
        raise ConfigError("`max_model_len` is set, but the windows of this model have a fixed length; leave it out")
    if config.attention_backend != "auto":
        raise ConfigError(
            f"`attention_backend: {config.attention_backend}` is set, but this model runs its own; leave it out"
        )
    if config.padding == "real":
        raise ConfigError("`padding: real` is set, but windows all have one length; leave it out")


def _describe(directory: Path, model: Any) -> tuple[AudioFacts, Rules]:
    """Raises ModelError for files that do not fit each other, or lack what transcripts with times need."""
    extractor, config, generation = load_extractor(directory), model.config, model.generation_config
    positions = int(config.max_source_positions)
    if extractor.num_mels != config.num_mel_bins or extractor.window_frames != 2 * positions:
        made = f"{extractor.window_frames} frames of {extractor.num_mels} numbers"
        raise ModelError(
            f"its feature extractor makes {made}; the model takes {2 * positions} of {config.num_mel_bins}"
        )
    try:
        rules = Rules.read(generation)
        names = getattr(generation, "lang_to_id", None) or {}
        languages = {str(name).strip("<|>"): int(token) for name, token in names.items()}
        known = getattr(generation, "task_to_id", None) or {}
        tasks = {task: int(known[task]) for task in _TASKS if task in known}
        if getattr(generation, "is_multilingual", None) is False:
            languages, tasks = {}, {}
        end = generation.eos_token_id
        facts = AudioFacts(
            num_mels=extractor.num_mels,
            window_seconds=extractor.window_seconds,
            window_frames=extractor.window_frames,
            frames_per_position=2,
            languages=languages,
            tasks=tasks,
            start=int(generation.decoder_start_token_id),
            previous=getattr(generation, "prev_sot_token_id", None) or _find_previous(generation),
            end=int(end[0] if isinstance(end, list) else end),
            first_timestamp=rules.no_timestamps + 1,
            max_tokens=int(config.max_target_positions),
        )
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ModelError(
            f"{directory / 'generation_config.json'} has not what Whisper's has ({checks.on_one_line(error)})"
        ) from error
    _check_tokens(facts, rules, int(config.vocab_size))
    return facts, rules


def _find_previous(generation: Any) -> int | None:
    """As transformers finds it in older files: the second to last of the suppressed tokens."""
    suppressed = list(generation.suppress_tokens or [])
    return int(suppressed[-2]) if len(suppressed) >= 2 else None


def _check_tokens(facts: AudioFacts, rules: Rules, vocab_size: int) -> None:
    named = [
        *facts.languages.values(), *facts.tasks.values(), *rules.suppressed, *rules.suppressed_first,
        facts.start, facts.end, facts.first_timestamp, facts.first_timestamp + (rules.max_first_timestamp or 0),
        facts.previous or 0,
    ]  # fmt: skip
    if wrong := [token for token in named if not 0 <= token < vocab_size]:
        raise ModelError(f"its generation_config.json names token {wrong[0]}, and the model has {vocab_size}")
    if facts.end >= facts.first_timestamp or facts.max_tokens < 16:
        raise ModelError("its generation_config.json is not one of Whisper: timestamps are not the last tokens")
