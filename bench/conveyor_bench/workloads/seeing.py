"""Workload see: prompts with an image each, one and 16 at a time, beside transformers' `generate` on the same batch.

Both systems begin with processed pictures and tokens, and end with tokens. All pictures have one size, so the peer's
batch has no padding. First, both must give the same tokens in float32.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

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
from conveyor_bench.workloads.rounds import Figures, Limits
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.chat_pictures import ChatPictures, load_chat_pictures
from conveyor_engine.tasks.generate.execution.sight import unpack
from conveyor_engine.wire.pictures import PictureSpan, PlacedPicture, encode_pictures
from conveyor_engine.wire.request import EngineRequest, SamplingParams

PEER: Final = "hf-static"
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


Prompt = tuple[list[int], PlacedPicture]
Run = Callable[[Sequence[Prompt]], tuple[float, list[list[int]]]]  # returns seconds to a first token, and all tokens


def measure_seeing(shape: str, dtype: str, limits: Limits, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure both systems' seconds and their ratios. Exits if the tokens differ."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, SHAPES[shape])
        report(f"event=model_written shape={shape}")
        reader, side = load_chat_pictures(directory), SHAPES[shape].side
        two = draw(reader, side, 2, seed=0)
        if Engine(directory, "float32").run(two)[1] != Peer(directory, "float32").run(two)[1]:
            raise SystemExit("float32 tokens differ from transformers': one of them is wrong here")
        report(f"event=tokens_equal dtype=float32 model={shape} images=2: same as transformers'")
        runs: dict[str, Run] = {OURS: Engine(directory, dtype).run, PEER: Peer(directory, dtype).run}
        rounds, dropped = _measure(runs, partial(draw, reader, side), limits, report)
    ratios = {name: estimate(_ratios(rounds, name)) for name in rounds[0][OURS]}
    return {
        "same_float32_tokens_as_transformers": True,
        "figures": {
            system: {name: round(median(each[system][name] for each in rounds), 4) for name in ratios}
            for system in runs
        },
        "ratio": {name: round(found.value, 3) if found else None for name, found in ratios.items()},
        "spread": {name: round(found.spread, 3) if found else None for name, found in ratios.items()},
        "rounds": len(rounds),
        "dropped": dropped,
        "workload": {"model_shape": shape, "dtype": dtype, "side": side, "output_tokens": TOKENS},
    }


def _ratios(rounds: Sequence[Mapping[str, Figures]], name: str) -> list[float]:
    return [each[PEER][name] / each[OURS][name] for each in rounds]


def _measure(
    runs: Mapping[str, Run],
    draw_prompts: Callable[[int, int], list[Prompt]],
    limits: Limits,
    report: Callable[[str], None],
) -> tuple[list[dict[str, Figures]], int]:
    """Run rounds, after one to warm up. Returns the figures of each round by system, and how many were dropped."""
    begun, rounds, dropped = time.monotonic(), list[dict[str, Figures]](), -1
    while not rounds or (len(rounds) < limits.rounds and time.monotonic() - begun < limits.budget_seconds):
        found = estimate(_ratios(rounds, "all_1")) if rounds else None
        if found is not None and found.settled:
            break
        before, taken = processor_ticks(), dict[str, Figures]()
        for name in list(runs)[:: -1 if len(rounds) % 2 else 1]:
            figures: dict[str, float] = {}
            for number in NUMBERS:
                prompts = draw_prompts(number, 1 + len(rounds) + dropped)
                started = time.perf_counter()
                first, _ = runs[name](prompts)
                figures |= {f"all_{number}": time.perf_counter() - started, f"first_token_{number}": first}
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

    def run(self, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]]]:
        """Return the median seconds to a first token, and all tokens."""
        started, tokens, firsts = time.perf_counter(), dict[str, list[int]](), list[float]()
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        for prompt, placed in prompts:
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
        return median(firsts), list(tokens.values())


class Peer:
    """transformers' `generate` on one batch."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._ends: list[float] = []  # of forwards
        self._model.register_forward_hook(lambda *_: self._ends.append(time.perf_counter()))

    def run(self, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]]]:
        """Return the seconds to the first tokens, and all tokens."""
        started = time.perf_counter()
        self._ends.clear()
        self._model.base_model.rope_deltas = None  # of an earlier batch
        tokens = torch.tensor([prompt for prompt, _ in prompts])
        inputs = {
            name: torch.cat([unpack(placed.picture, name) for _, placed in prompts])
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
        return self._ends[0] - started, answers


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
    """Draw so many prompts, each of an image and a text."""
    numbers, prompts = np.random.default_rng(seed), list[Prompt]()
    for _ in range(number):
        pixels = numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)
        picture, text = reader.read(Image.fromarray(pixels))
        shown = reader.encode(text)
        span = PictureSpan(1, 1 + len(shown), picture.digest())
        tokens = [2, *shown, 3, *numbers.integers(100, _VOCABULARY, TEXT_TOKENS).tolist()]
        prompts.append((tokens, PlacedPicture(span, picture)))
    return prompts
