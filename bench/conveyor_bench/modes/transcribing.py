"""Transcribe files of 5 to 60 s with Whisper's shapes and random weights: `python -m conveyor_bench speech`.

`--rates` compares batching modes with files that arrive at random. `--peers` compares throughput with transformers'
`generate` and with CTranslate2, the engine of faster-whisper; the systems run in turns. A model with random weights
does not end its transcripts. So each window of 30 s has a fixed number of tokens, which is the same for all systems.
A window is transcribed after the one before it in its file.

Everything runs on one thread, and the clock is the processor time of this thread. So other load on the machine affects
the figures only through the shared processor caches.
"""

import argparse
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.transcribe.facts import AudioFacts, Window
from conveyor_engine.wire.request import EngineRequest, SamplingParams
from conveyor_load.percentiles import percentile

MODES: Final = ("dynamic", "continuous")
SHAPES: Final = {"tiny": (384, 6, 4), "base": (512, 8, 6), "small": (768, 12, 12)}  # hidden size, heads, layers
SECONDS: Final = (5, 60)  # shortest and longest file
WINDOW_SECONDS: Final = 30
TOKENS_PER_SECOND: Final = (2.0, 4.0)  # tokens for a second of speech, timestamps included
PROMPT: Final = (50258, 50259, 50359)  # start, English, transcribe
END: Final = 50257
SEED: Final = 20261127


@dataclass(frozen=True, slots=True)
class File:
    """A file of speech."""

    seconds: float
    windows: tuple[int, ...]  # the number of tokens in each window's transcript


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one mode at one rate."""

    seconds: list[float]  # from each file's arrival to the end of its transcript
    total_seconds: float
    rows: float  # mean number of transcripts in a step

    def describe(self, mode: str, rate: float) -> str:
        """Return a row of the table."""
        p50, p95 = (percentile(self.seconds, share) for share in (50, 95))
        per_second = len(self.seconds) / self.total_seconds
        return f"| {mode} | {rate:.2f} | {per_second:.2f} | {p50:.1f} | {p95:.1f} | {self.rows:.1f} |"


def main(arguments: Sequence[str]) -> int:
    """Print a table with a row for each mode at each rate or, with `--peers`, for each system. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench speech", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="number type")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.4, 0.6], help="files a second")
    parser.add_argument("--files", type=int, default=32, help="at each rate")
    parser.add_argument("--batch", type=int, default=16, help="the most transcripts in a step")
    parser.add_argument("--peers", action="store_true", help="compare throughput with other systems")
    parser.add_argument("--rounds", type=int, default=2, help="of each system, with --peers")
    flags = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files = [draw_file(number) for number in range(flags.files)]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_model(directory, flags.shape)
        if flags.peers:
            compare(directory, flags.dtype, files, flags.batch, flags.rounds)
            return 0
        print(
            f"Whisper {flags.shape}, {flags.dtype}, {len(files)} files of {SECONDS[0]} to {SECONDS[1]} s at each rate"
        )
        print("| mode | arrive/s | done/s | P50 s | P95 s | transcripts a step |")
        print("| --- | --- | --- | --- | --- | --- |")
        for rate in flags.rates:
            for mode in MODES:
                core = open_engine(directory, mode, flags.dtype, flags.batch)
                print(measure(core, files, draw_arrivals(rate, len(files))).describe(mode, rate), flush=True)
    return 0


def draw_file(number: int) -> File:
    """Draw a file. The same number always gives the same file, so all systems get the same files."""
    draw = random.Random(f"{SEED} {number}")
    seconds = draw.uniform(*SECONDS)
    rest, windows = seconds, list[int]()
    while rest > 0:
        windows.append(max(4, round(min(rest, WINDOW_SECONDS) * draw.uniform(*TOKENS_PER_SECOND))))
        rest -= WINDOW_SECONDS
    return File(seconds, tuple(windows))


def draw_arrivals(rate: float, number: int) -> list[float]:
    """Draw the times of `number` Poisson arrivals, in seconds, ascending. rate: arrivals per second."""
    draw = random.Random(SEED)
    return list(accumulate(draw.expovariate(rate) for _ in range(number)))


def draw_features(number: int) -> npt.NDArray[np.float32]:
    """Return random features (frames, mels) of a window. Their values do not change how long a step takes."""
    return np.random.default_rng(number).normal(0, 0.5, (WINDOW_SECONDS * 100, 80)).astype(np.float32)


def save_model(directory: Path, shape: str) -> None:
    """Save a model of this shape with random weights, with its generation config and feature extractor."""
    hidden, heads, layers = SHAPES[shape]
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=hidden, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * hidden, decoder_ffn_dim=4 * hidden, init_std=0.05,
        decoder_start_token_id=PROMPT[0], eos_token_id=END, bos_token_id=END, pad_token_id=END,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        decoder_start_token_id=PROMPT[0], eos_token_id=END, bos_token_id=END, pad_token_id=END,
        no_timestamps_token_id=50363, suppress_tokens=[1, 2, 7, 50360], begin_suppress_tokens=[220, END],
        max_initial_timestamp_index=50, is_multilingual=True, lang_to_id={"<|en|>": PROMPT[1]},
        task_to_id={"transcribe": PROMPT[2], "translate": 50358}, prev_sot_token_id=50361, max_length=448,
    )  # fmt: skip
    model.save_pretrained(directory)
    WhisperFeatureExtractor().save_pretrained(directory)


def open_engine(directory: Path, mode: str, dtype: str, batch: int) -> EngineCore:
    """Open an engine without a warm-up, because the measurement would include it."""
    config = EngineConfig(
        model=str(directory), device="cpu", dtype=dtype, batching_mode=mode,  # type: ignore[arg-type]  # of MODES
        max_num_seqs=batch, max_num_queued_requests=100_000, num_threads=1, warmup=False,
    )  # fmt: skip
    return EngineCore(config, build_runner(config))


def measure(core: EngineCore, files: Sequence[File], arrivals: Sequence[float]) -> Result:
    """Transcribe files. arrivals: when each file arrives, in seconds of processor time, ascending."""
    waiting = deque(enumerate(arrivals))
    seconds: list[float] = []
    now = 0.0
    while waiting or core.has_unfinished():
        while waiting and waiting[0][1] <= now:
            core.add_request(build_request(core, files, waiting.popleft()[0], 0))
        due_at = core.next_wakeup(now)
        if due_at is None or due_at > now:
            arrival = waiting[0][1] if waiting else due_at
            now = min(moment for moment in (due_at, arrival) if moment is not None)
            continue
        began = time.process_time()
        outputs = core.step(now)
        now += time.process_time() - began
        for output in outputs:
            if output.finish_reason is None:
                continue
            number, window = map(int, output.request_id.split("-"))
            if window + 1 < len(files[number].windows):
                core.add_request(build_request(core, files, number, window + 1))
            else:
                seconds.append(now - arrivals[number])
    stats = core.stats()
    return Result(seconds, now, stats.generation_tokens / stats.num_steps)


def build_request(core: EngineCore, files: Sequence[File], number: int, window: int) -> EngineRequest:
    """Build the engine request for a window of a file. It generates exactly as many tokens as the window has."""
    return EngineRequest(
        request_id=f"{number}-{window}",
        prompt_token_ids=PROMPT,
        payload=Window(features=draw_features(number).tobytes()).encode(),
        payload_cost=AudioFacts.read(core.facts).window_cost,
        params=SamplingParams(max_tokens=files[number].windows[window], temperature=0.0, ignore_eos=True),
    )


# --- throughput beside other systems ---

System = Callable[[Sequence[File], int], object]


def compare(directory: Path, dtype: str, files: Sequence[File], batch: int, rounds: int) -> None:
    """Print how many seconds of sound each system transcribes in a second. All files arrive at the beginning."""
    core = open_engine(directory, "continuous", dtype, batch)
    systems: dict[str, System] = {
        "Conveyor, Continuous": lambda some, _: measure(core, some, [0.0] * len(some)),
        "transformers' generate, batches": open_transformers(directory, dtype),
    }
    if (found := find_ctranslate2(directory, dtype)) is not None:
        systems["CTranslate2, batches"] = found
    spent = dict.fromkeys(systems, 0.0)
    for system in systems.values():
        system(files[:1], 1)  # a warm-up, which is not measured
    for number in range(rounds):
        for name in list(systems)[:: 1 if number % 2 else -1]:
            began = time.process_time()
            systems[name](files, batch)
            spent[name] += time.process_time() - began
    sound, (first, *_) = rounds * sum(file.seconds for file in files), spent.values()
    print(f"{len(files)} files of {SECONDS[0]} to {SECONDS[1]} s, batches of {batch}, {dtype}, {rounds} rounds")
    print("| system | seconds of sound in a second | Conveyor's figure divided by this one |")
    print("| --- | --- | --- |")
    for name, seconds in spent.items():
        print(f"| {name} | {sound / seconds:.1f} | {seconds / first:.2f} |")


def list_batches(files: Sequence[File], batch: int) -> list[list[tuple[int, int]]]:
    """Return batches of windows (number of the file, number of tokens).

    The first windows of all files come first, then all second windows, and so on. Each such group is sorted by length.
    """
    batches = []
    for window in range(max(len(file.windows) for file in files)):
        some = [(file.windows[window], number) for number, file in enumerate(files) if window < len(file.windows)]
        ordered = [(number, tokens) for tokens, number in sorted(some)]
        batches += [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    return batches


def open_transformers(directory: Path, dtype: str) -> System:
    """Return a system that calls transformers' `generate`. A batch runs until its longest window is complete."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def run(files: Sequence[File], batch: int) -> None:
        for windows in list_batches(files, batch):
            features = torch.from_numpy(np.stack([draw_features(number).T for number, _ in windows]))
            longest = max(tokens for _, tokens in windows)
            with torch.inference_mode():
                model.generate(
                    features.to(model.dtype), language="en", task="transcribe", return_timestamps=True,
                    min_new_tokens=longest, max_new_tokens=longest, do_sample=False,
                )  # fmt: skip

    return run


def find_ctranslate2(directory: Path, dtype: str) -> System | None:
    """Return a system that calls CTranslate2 with the same model; None if CTranslate2 is not installed.

    If CTranslate2 does not support `dtype` on this CPU, it computes in float32.
    """
    try:
        import ctranslate2  # type: ignore[import-not-found]  # not among the project's dependencies
    except ImportError:
        return None
    converted = directory / "ctranslate2"
    converted.mkdir()
    model = WhisperForConditionalGeneration.from_pretrained(directory)
    spec = ctranslate2.converters.transformers.WhisperLoader().get_model_spec(model)
    names = {PROMPT[0]: "<|startoftranscript|>", END: "<|endoftext|>", 50362: "<|nospeech|>", 50363: "<|notimestamps|>"}
    spec.register_vocabulary([names.get(token, f"<{token}>") for token in range(model.config.vocab_size)])
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(converted))
    kind = dtype if dtype in ctranslate2.get_supported_compute_types("cpu") else "float32"
    whisper = ctranslate2.models.Whisper(str(converted), device="cpu", compute_type=kind, intra_threads=1)

    def run(files: Sequence[File], batch: int) -> None:
        for windows in list_batches(files, batch):
            features = np.stack([draw_features(number).T for number, _ in windows])
            longest = max(tokens for _, tokens in windows)
            whisper.generate(
                ctranslate2.StorageView.from_array(np.ascontiguousarray(features)), [list(PROMPT)] * len(windows),
                beam_size=1, max_length=len(PROMPT) + longest, suppress_tokens=[END],
            )  # fmt: skip

    return run
