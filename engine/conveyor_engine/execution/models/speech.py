"""Chooses a transcript's tokens greedily, many windows at a time, as transformers' `generate` does for each alone.

Used by `runners.speech`. The rules are those of Whisper: timestamps come in pairs and never go back, and a timestamp
comes when all of them together are likelier than any word. A batch goes on until its last row has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from conveyor_engine.execution.models.whisper import Cache, Decoder
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.audio import AudioFacts, Window, WindowResult

_STEPS_BETWEEN_CHECKS: Final = {"cpu": 1, "cuda": 8}  # whether rows have ended: it makes the host wait for the device
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Rules:
    """Which tokens may come, from the model's generation_config.json."""

    suppressed: Sequence[int]
    suppressed_first: Sequence[int]
    no_timestamps: int
    max_first_timestamp: int | None  # the latest one that a window may begin with, counted from 0 s

    @classmethod
    def read(cls, config: Any) -> "Rules":
        """`config`: transformers' GenerationConfig."""
        return cls(
            tuple(config.suppress_tokens or ()),
            tuple(config.begin_suppress_tokens or ()),
            int(config.no_timestamps_token_id),
            getattr(config, "max_initial_timestamp_index", None),
        )


class Transcriber:
    """One model's decoder, and its rules as tensors of its device."""

    def __init__(self, model: Any, facts: AudioFacts, rules: Rules, device: torch.device) -> None:
        self._decoder, self._facts, self._device = Decoder(model), facts, device
        self._no_speech = rules.no_timestamps - 1
        size = int(model.config.vocab_size)
        always, first, languages = torch.zeros(size), torch.zeros(size), torch.full((size,), _NEVER)
        always[[*rules.suppressed, rules.no_timestamps]] = _NEVER
        first[[*rules.suppressed_first]] = _NEVER
        first[: facts.first_timestamp] = _NEVER
        if rules.max_first_timestamp is not None:
            first[facts.first_timestamp + rules.max_first_timestamp + 1 :] = _NEVER
        languages[list(facts.languages.values())] = 0.0
        self._always, self._first, self._languages = (each.to(device) for each in (always, first, languages))

    def transcribe(self, encoded: torch.Tensor, windows: Sequence[Window]) -> list[WindowResult]:
        """Return the transcript of each window from the encoder's output (windows, positions, hidden)."""
        batch = _Batch(self._decoder, self._facts, encoded, windows, self._device)
        languages = self._find_languages(batch, windows)
        prompt, last, starts = batch.read_prompts()
        silent = torch.softmax(self._decoder.score(starts), dim=-1)[:, self._no_speech]
        scores = self._decoder.score(last)
        scores += self._always
        batch.add(*self._choose(batch, scores + self._first))
        interval = _STEPS_BETWEEN_CHECKS[self._device.type]
        for step in range(1, batch.max_steps):
            if step % interval == 0 and not batch.drop_ended():
                break
            scores = self._decoder.score(batch.read_last(prompt + step))
            scores += self._always
            self._apply_timestamp_rules(batch, scores)
            batch.add(*self._choose(batch, scores))
        return batch.collect(languages, silent)

    def _find_languages(self, batch: "_Batch", windows: Sequence[Window]) -> torch.Tensor | None:
        """Put the likeliest language into the prompts that lack one. Return those of all rows, if any lacks one."""
        asking = [row for row, window in enumerate(windows) if window.language_at is not None]
        if not asking:
            return None
        found = (self._decoder.score(batch.read_start()) + self._languages).argmax(dim=-1)
        rows = to_device(np.array(asking), self._device)
        places = to_device(np.array([windows[row].language_at for row in asking]), self._device)
        batch.prompts[rows, places] = found[rows]
        return found

    def _apply_timestamp_rules(self, batch: "_Batch", scores: torch.Tensor) -> None:
        """Forbid tokens in scores (rows, vocabulary), in place."""
        first, rows = self._facts.first_timestamp, batch.num_rows
        was_time = batch.last[:rows] >= first
        had_time = batch.before_last[:rows] >= first
        words, times = scores[:, :first], scores[:, first:]
        times.masked_fill_((was_time & had_time)[:, None], _NEVER)
        words[:, : self._facts.end].masked_fill_((was_time & ~had_time)[:, None], _NEVER)
        lowest = batch.last_time[:rows] + torch.where(was_time & ~had_time, 0, 1)
        times.masked_fill_(torch.arange(times.shape[1], device=scores.device) < lowest[:, None], _NEVER)

    def _choose(self, batch: "_Batch", scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's token, and its log probability."""
        first = self._facts.first_timestamp
        best_word, word = scores[:, :first].max(dim=-1)
        best_time, time = scores[:, first:].max(dim=-1)
        sum_times = scores[:, first:].logsumexp(dim=-1)
        must_be_time = sum_times > best_word
        is_time = must_be_time | (best_time > best_word)
        total = torch.where(must_be_time, sum_times, scores.logsumexp(dim=-1))
        chosen = torch.where(is_time, time + first, word)
        return chosen, torch.where(is_time, best_time, best_word) - total


class _Batch:
    """The rows of one batch. Rows that have ended give their place to the last one that goes on."""

    def __init__(
        self, decoder: Decoder, facts: AudioFacts, encoded: torch.Tensor, windows: Sequence[Window],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._decoder, self._facts, self._windows, self._device = decoder, facts, windows, device
        lengths = [len(window.tokens) for window in windows]
        self.num_rows, self._longest = len(windows), max(lengths)
        self._lengths = np.array(lengths)
        rooms = facts.max_tokens - self._lengths
        asked = [room if w.max_new_tokens is None else w.max_new_tokens for w, room in zip(windows, rooms, strict=True)]
        self._limits = np.minimum(rooms, asked)
        self.max_steps = int(self._limits.max())
        prompts = np.zeros((len(windows), self._longest), np.int64)
        for row, window in enumerate(windows):
            prompts[row, : lengths[row]] = window.tokens
        self.prompts = to_device(prompts, device)
        self._next = to_device(self._lengths.copy(), device)  # the position of the token that comes next
        total = min(facts.max_tokens, self._longest + self.max_steps)
        self._cache = Cache(decoder, len(windows), total, decoder.read_sound(encoded))
        self._tokens = torch.full((len(windows), self.max_steps), facts.end, device=device)
        self._logprobs = torch.zeros((len(windows), self.max_steps), device=device)
        self._of_window = np.arange(len(windows))  # the window of each row
        self._rows_of_windows = to_device(self._of_window.copy(), device)
        self.last = torch.full((len(windows),), facts.first_timestamp, device=device)
        self.before_last = self.last.clone()
        self.last_time = torch.full((len(windows),), -1, device=device)
        self._step = 0

    def read_start(self) -> torch.Tensor:
        """The decoder's output (rows, hidden) for the token that begins every transcript, by itself."""
        start = torch.full((self.num_rows, 1), self._facts.start, device=self._device)
        return self._decoder.run(start, torch.zeros_like(start), self._cache, 1)[:, 0]

    def read_prompts(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Compute the prompts. Return the longest one's length, and (rows, hidden) of each last and start token."""
        positions = torch.arange(self._longest, device=self._device).expand(self.num_rows, -1)
        hidden = self._decoder.run(self.prompts, positions, self._cache, self._longest)
        rows = torch.arange(self.num_rows, device=self._device)
        starts = [window.tokens.index(self._facts.start) for window in self._windows]
        return self._longest, hidden[rows, self._next - 1], hidden[rows, to_device(np.array(starts), self._device)]

    def read_last(self, length: int) -> torch.Tensor:
        """Compute the newest token of each row -> (rows, hidden). `length`: positions of the longest row."""
        rows, room = self.num_rows, self._cache.length
        positions = (self._next[:rows, None] - 1).clamp(
            max=room - 1
        )  # of a row that has ended unnoticed it may be more
        return self._decoder.run(self.last[:rows, None], positions, self._cache, min(length, room))[:, 0]

    def add(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Give each row its next token."""
        rows, first = self.num_rows, self._facts.first_timestamp
        windows = self._rows_of_windows[:rows]
        self._tokens[windows, self._step] = tokens
        self._logprobs[windows, self._step] = logprobs
        self.before_last[:rows] = self.last[:rows] if self._step else first
        self.last[:rows] = tokens
        self.last_time[:rows] = torch.where(tokens >= first, tokens - first, self.last_time[:rows])
        self._next[:rows] += 1
        self._step += 1

    def drop_ended(self) -> int:
        """Take rows that have ended out of the batch. Return how many go on."""
        newest = self._tokens[:, max(0, self._step - max(_STEPS_BETWEEN_CHECKS.values())) : self._step]
        has_end = (newest == self._facts.end).any(dim=1).cpu().numpy()
        row = 0
        while row < self.num_rows:
            window = self._of_window[row]
            ended = has_end[window] and not self._windows[window].never_ends
            if not ended and self._step < self._limits[window]:
                row += 1
                continue
            self.num_rows -= 1
            if row != self.num_rows:
                self._move(self.num_rows, row)
        return self.num_rows

    def _move(self, source: int, target: int) -> None:
        self._cache.move(source, target, self._longest + self._step)
        self._of_window[target] = self._of_window[source]
        for state in (self.last, self.before_last, self.last_time, self._next, self._rows_of_windows):
            state[target] = state[source]

    def collect(self, languages: torch.Tensor | None, silent: torch.Tensor) -> list[WindowResult]:
        """The result of each window."""
        tokens, logprobs = self._tokens.cpu().numpy(), self._logprobs.cpu().numpy()
        found, silences = None if languages is None else languages.tolist(), silent.tolist()
        results = []
        for row, window in enumerate(self._windows):
            own = tokens[row, : self._limits[row]]
            ends = np.flatnonzero(own == self._facts.end)
            number = len(own) if window.never_ends or not len(ends) else int(ends[0])
            counted = logprobs[row, : min(number + 1, len(own))]
            results.append(
                WindowResult(
                    tokens=own[:number].tolist(),
                    language=found[row] if found is not None and window.language_at is not None else None,
                    avg_logprob=float(counted.mean()),
                    no_speech_prob=float(silences[row]),
                )
            )
        return results
