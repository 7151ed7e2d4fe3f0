"""Runs the scheduler's plans on a model that transcribes speech: encodes windows, and generates their transcripts.

Like `generate`, it implements the protocol `loop.executor` for one device. The sound of a window is the first part of
its row in the KV cache (`whisper`), so plans count it as tokens. The first step of a row computes its sound and
its prompt. The features come from the worker processes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.attention.backend import AttentionMetadata
from conveyor_engine.execution.attention.packed import choose_packed
from conveyor_engine.execution.attention.select import select_backend
from conveyor_engine.execution.batch import Batch, build_batch, lay_out
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.kinds import SPEECH
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.sampling.sampler import Sampler, peak_bytes
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.transfer import HostCopy, to_device
from conveyor_engine.tasks.transcribe.execution.alignment import Alignment, Listened, find_positions
from conveyor_engine.tasks.transcribe.execution.files import describe_speech, read_alignment_heads, read_median_width
from conveyor_engine.tasks.transcribe.execution.model import TranscriptRules
from conveyor_engine.tasks.transcribe.execution.whisper import Decoder, Encoder
from conveyor_engine.tasks.transcribe.facts import Window, WindowStart
from conveyor_engine.wire.request import TokenLogprobs
from conveyor_engine.wire.step import StepPlan, StepResult


class _Beginning(NamedTuple):
    """A row whose window begins in this step."""

    place: int  # index of the row in the plan
    row: int
    window: Window
    prompt: Sequence[int]  # includes the tokens that were generated before a preemption


class _Found(NamedTuple):
    """What the model found in the windows that begin in this step, on the device."""

    languages: torch.Tensor  # int64 (undetected,): the language token of each window whose language is not given
    no_speech: torch.Tensor  # float32 (beginning,): the probability that a window contains no speech
    fits: list[torch.Tensor]  # float32 (tokens, positions) for each window whose tokens get times


class SpeechRunner(Runner):
    """One speech model on one device, ready to run after construction."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model and allocate the KV caches. Raises ConfigError or ModelError."""
        start = RunnerStart(config, placement, progress, SPEECH)
        self.device, self._dtype, self._block_size = start.device, start.dtype, config.block_size
        self._backend = select_backend(
            config.attention_backend, self.device, start.dtype, config.block_size, config.kv_cache_dtype
        )
        self.model: Any = start.load()
        self._of_task, tokens = describe_speech(Path(config.model), self.model, config.block_size)
        self._try(start)
        choose_attention = choose_packed(config.attention_backend, self.device, start.dtype)
        self._encoder, self._decoder = Encoder(self.model, choose_attention), Decoder(self.model, self._backend)
        seconds, number = self._of_task.window_seconds, start.max_num_seqs
        progress(f"event=model_loaded window_seconds={seconds} languages={len(self._of_task.languages)}")
        max_model_len = self._of_task.window_cost + self._of_task.max_tokens
        self._rows = Rows(number, max_model_len, config.block_size, self.device)
        self._text_rows = self._rows.after(self._of_task.window_cost // config.block_size)
        vocab_size = int(self.model.config.vocab_size)
        self.facts = start.facts(
            self.model,
            max_model_len=max_model_len,
            attention_backend=self._backend.name,
            eos_token_ids=(self._of_task.end,),
            num_kv_blocks=self._allocate(start, max_model_len, vocab_size),
            max_num_batched_tokens=config.max_num_batched_tokens or number * max_model_len,
            vocab_size=vocab_size,
            of_task=self._of_task.encode(),
        )
        self._languages = torch.tensor(sorted(self._of_task.languages.values()), device=self.device)
        self._alignment_heads = read_alignment_heads(self.model)
        self._median_width = read_median_width(self.model)
        self._rules = TranscriptRules(tokens, self._of_task, vocab_size, self._rows.token_ids)
        self._sampler = Sampler(number, vocab_size, self.device, self._rows.token_ids)

    def _try(self, start: RunnerStart) -> None:
        """Run the model once on a silent window. Raises ModelError if its parts do not fit each other."""
        tokens = torch.tensor([[self._of_task.start]], device=start.device)
        checks.run_once(
            "the model cannot transcribe",
            lambda: self.model(input_features=self._stack([b""]), decoder_input_ids=tokens),
        )

    def _allocate(self, start: RunnerStart, max_model_len: int, vocab_size: int) -> int:
        """Allocate the KV caches. Returns the number of blocks. Raises ConfigError if the cache is too small."""
        step_bytes = self._find_step_bytes(start, max_model_len)
        step_bytes += peak_bytes(start.max_num_seqs, vocab_size, self.device)
        return start.allocate_cache(self._backend, self._decoder.shapes, max_model_len, step_bytes)

    def _find_step_bytes(self, start: RunnerStart, max_model_len: int) -> int:
        """Return the bytes of the largest step: it begins as many windows as fit, and every row gets a token."""
        budget = start.config.max_num_batched_tokens
        number = start.max_num_seqs if budget is None else max(1, min(start.max_num_seqs, budget // max_model_len))
        num_tokens, settings = number * self._of_task.num_positions, "`max_num_seqs` or `max_num_batched_tokens`"

        def run() -> torch.Tensor:
            encoded = self._encode([b""] * number)
            return self._decoder.score(encoded[: start.max_num_seqs])

        return start.find_step_bytes(self.model, num_tokens, settings, run, num_logits=start.max_num_seqs)

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begin a step: encode the windows that begin, and compute logits. Return a function that samples.

        That function returns another one, which waits for the tokens. On a GPU, all work before that is only launched.
        """
        with torch.inference_mode():
            beginning = self._begin_rows(plan)
            text = _cut_sound(plan, self._of_task.window_cost)
            alignment = self._align(beginning, text)
            found = self._listen(beginning, alignment) if beginning else None
            if not text.rows:
                return lambda _: lambda: StepResult(plan.number, [])
            batch = build_batch(text, self._text_rows, self._block_size)
            sound = self._find_sound(to_device(lay_out(text).token_rows, self.device))
            inputs = batch.input_ids[0], batch.position_ids[0]
            hidden = self._decoder.run(*inputs, batch.metadata, sound, alignment)
            if found is not None:
                no_speech = self._find_silence(beginning, text, batch, hidden)
                found = found._replace(no_speech=no_speech, fits=alignment.finish() if alignment else [])
            logits = self._decoder.score(hidden[batch.logit_indices])
        return partial(self._sample, plan, batch, logits, beginning, found)

    def _begin_rows(self, plan: StepPlan) -> list[_Beginning]:
        """Apply the plan's changes to the rows. Return the rows whose windows begin in this step."""
        self._rows.update(plan)
        admitted = {each.row: each for each in plan.admitted}
        for row, each in admitted.items():
            assert each.sampling is not None
            self._sampler.set_row(row, each.sampling)
            self._rules.set_row(row, each.token_ids, each.sampling.num_prompt_tokens)
        return [
            _Beginning(place, row, Window.read(admitted[row].payload), admitted[row].token_ids.tolist())
            for place, (row, computed) in enumerate(zip(plan.rows, plan.num_computed_tokens, strict=True))
            if computed == 0
        ]

    def _align(self, beginning: Sequence[_Beginning], text: StepPlan) -> Alignment | None:
        """Return the collector of attention to the sound; None if no window's tokens get times in this step."""
        starts = dict(zip(text.rows, np.cumsum([0, *text.num_tokens]).tolist(), strict=False))
        listened = [
            Listened(
                window,
                starts[each.row] + each.window.align_from,
                len(each.prompt) - each.window.align_from,
                each.window.align_positions,
            )
            for window, each in enumerate(beginning)
            if each.window.align_positions and each.row in starts
        ]
        return Alignment(self._alignment_heads, listened, self._median_width) if listened else None

    def _listen(self, beginning: Sequence[_Beginning], alignment: Alignment | None) -> _Found:
        """Encode the windows, write their sound to the caches, and find the languages that are not given.

        The returned `no_speech` and `fits` are empty.
        """
        encoded = self._encode([each.window.features for each in beginning])
        positions = self._of_task.num_positions
        rows = to_device(np.array([each.row for each in beginning]), self.device)
        places = torch.arange(positions, device=self.device)
        blocks = self._rows.block_tables[rows][:, places // self._block_size].long()
        slots = blocks * self._block_size + places % self._block_size
        metadata = _build_metadata(self._rows.block_tables[rows], slots.flatten(), positions, positions)
        self._decoder.write_sound(encoded, metadata, alignment)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        undetected = [each for each in beginning if each.window.language_at is not None]
        return _Found(self._find_languages(undetected) if undetected else nothing, nothing.float(), [])

    def _find_languages(self, undetected: Sequence[_Beginning]) -> torch.Tensor:
        """Find the likeliest language after the transcript's first token. Return the tokens int64 (undetected,).

        Each token is also written to its row, at `language_at`.
        """
        rows = to_device(np.array([each.row for each in undetected]), self.device)
        first = torch.zeros_like(rows)
        slots = self._text_rows.block_tables[rows, 0].long() * self._block_size
        own = _build_metadata(self._text_rows.block_tables[rows], slots, 1, 1)
        hidden = self._decoder.run(first + self._of_task.start, first, own, self._find_sound(rows))
        found = self._languages[self._decoder.score(hidden)[:, self._languages].argmax(dim=-1)]
        places = to_device(np.array([each.window.language_at for each in undetected]), self.device)
        self._rows.append(rows, places, found)
        return found

    def _find_sound(self, token_rows: torch.Tensor) -> AttentionMetadata:
        """Return cross-attention metadata with one query for each token, over all positions of its row's sound.

        token_rows: int64 (T,), the row of each token.
        """
        num_blocks = self._of_task.window_cost // self._block_size
        tables = self._rows.block_tables[token_rows, :num_blocks]
        return _build_metadata(tables, torch.zeros_like(token_rows), self._of_task.num_positions, 1)

    def _find_silence(
        self, beginning: Sequence[_Beginning], text: StepPlan, batch: Batch, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the probability that each window has no speech, float32 (beginning,).

        All transcripts begin with the same token. The result is the probability that "no speech" follows this token.
        """
        starts = dict(zip(text.rows, batch.metadata.query_start_loc_host.tolist(), strict=False))
        tokens = [starts[each.row] + each.prompt.index(self._of_task.start) for each in beginning if each.row in starts]
        scores = self._decoder.score(hidden[to_device(np.array(tokens, dtype=np.int64), self.device)])
        return torch.softmax(scores, dim=-1)[:, self._rules.no_speech]

    def _sample(
        self,
        plan: StepPlan,
        batch: Batch,
        logits: torch.Tensor,
        beginning: Sequence[_Beginning],
        found: _Found | None,
        _: object,
    ) -> Callable[[], StepResult]:
        """Sample the tokens and write them to the rows. Return a function that waits for them.

        logits: float32 (entries, vocabulary); the rules for timestamps change it in place.
        """
        samples = batch.samples
        with torch.inference_mode():
            self._rules.apply(logits, samples)
            tokens = self._sampler.sample(logits, samples).token_ids
            logprobs = logits.gather(1, tokens.clamp_min(0)[:, None])[:, 0] - logits.logsumexp(dim=-1)
            self._rows.append(samples.device_rows, samples.device_positions, tokens)
            self._rules.accept(samples, tokens)
            of_sound = () if found is None else (found.languages, found.no_speech, *found.fits)
            copy = HostCopy(tokens, logprobs, *of_sound)

        def read() -> StepResult:
            chosen_tokens, values, *rest = copy.wait()
            chosen = chosen_tokens.tolist()
            logprobs = [[TokenLogprobs.of(*each, [], [])] for each in zip(chosen, values.tolist(), strict=True)]
            payloads = _report_starts(len(plan.rows), beginning, *rest) if rest else None
            return StepResult(plan.number, [[token] for token in chosen], logprobs, payloads)

        return read

    def _encode(self, features: Sequence[bytes]) -> torch.Tensor:
        """Return the hidden states (windows x positions, hidden) of each window's packed features."""
        return self._encoder.run(self._stack(features))

    def _stack(self, features: Sequence[bytes]) -> torch.Tensor:
        """Return features (windows, mels, frames) on the device, in the model's dtype. The end is padded with zeros."""
        stacked = np.zeros((len(features), self._of_task.window_frames, self._of_task.num_mels), dtype=np.float32)
        for window, each in zip(stacked.reshape(len(features), -1), features, strict=True):
            numbers = np.frombuffer(each, dtype=np.float32)
            window[: len(numbers)] = numbers
        return to_device(stacked, self.device).to(self._dtype).transpose(1, 2)


def _cut_sound(plan: StepPlan, num_sound: int) -> StepPlan:
    """Return the plan without the first `num_sound` tokens of each row. Positions are counted after these tokens."""
    rows, computed, lengths, logits = [], [], [], []
    for row, begin, length, count in zip(
        plan.rows, plan.num_computed_tokens, plan.num_tokens, plan.num_logits, strict=True
    ):
        first = max(0, begin - num_sound)
        if (number := begin + length - num_sound - first) > 0:
            rows.append(row)
            computed.append(first)
            lengths.append(number)
            logits.append(count)
    return StepPlan(plan.number, [], [], rows, computed, lengths, logits, plan.num_decodes)


def _build_metadata(tables: torch.Tensor, slots: torch.Tensor, length: int, num_queries: int) -> AttentionMetadata:
    """Return metadata for rows of equal shape: `num_queries` queries over a context of `length` each.

    tables: int32 (rows, blocks). slots: int64 (tokens,), where keys and values are written.
    """
    number = len(tables)
    starts, lengths = np.arange(number + 1, dtype=np.int32) * num_queries, np.full(number, length, dtype=np.int32)
    return AttentionMetadata(
        query_start_loc=to_device(starts, tables.device),
        seq_lens=to_device(lengths, tables.device),
        block_tables=tables,
        slot_mapping=slots,
        num_seqs=number,
        num_decodes=number if num_queries == 1 else 0,
        num_tokens=number * num_queries,
        query_start_loc_host=starts,
        seq_lens_host=lengths,
    )


def _report_starts(
    num_rows: int,
    beginning: Sequence[_Beginning],
    languages: torch.Tensor,
    no_speech: torch.Tensor,
    *fits: torch.Tensor,
) -> list[bytes]:
    """Return an encoded `WindowStart` for each row of the plan whose window begins; empty bytes for other rows.

    languages: int64 (undetected,). no_speech: float32 (beginning,). fits: float32 (tokens, positions) each.
    """
    payloads, found, aligned = [b""] * num_rows, iter(languages.tolist()), iter(fits)
    for each, probability in zip(beginning, no_speech.tolist(), strict=False):
        start = WindowStart(
            language=None if each.window.language_at is None else next(found),
            no_speech_prob=probability,
            positions=find_positions(next(aligned).numpy()) if each.window.align_positions else [],
        )
        payloads[each.place] = start.encode()
    return payloads
