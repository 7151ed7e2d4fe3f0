"""The stage `nano-vllm` runs nano-vllm with its own bench.py, on a model of the same shape.

It needs nano-vllm and flash-attn in PYTHONPATH. A rehearsal only writes the model's directory and reads it.
"""

import importlib
import importlib.util
import tempfile
import time
from pathlib import Path
from random import randint, seed
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from conveyor_bench.comparing.shapes import SHAPES, model_config
from conveyor_bench.gpu.models import make_model
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes

_RUNS = 3  # the first one compiles
_LARGEST_ID = 10_000
_CONTEXT = 4096


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(folder, sizes)
        if sizes.device == "cpu":
            model = AutoModelForCausalLM.from_pretrained(folder)
            tokens = PreTrainedTokenizerFast.from_pretrained(folder).encode("Benchmark: ")
            results.row("rehearsed", shape=sizes.small, parameters=model.num_parameters(), tokens=len(tokens))
        elif importlib.util.find_spec("nanovllm") is None:
            results.row("runs", shape=sizes.small, error="not installed: nanovllm")
        else:
            torch.cuda.empty_cache()
            _run(results, sizes, folder)


def _write_model(folder: Path, sizes: Sizes) -> None:
    """Write a model with random weights, and a tokenizer that nano-vllm can load."""
    config = model_config(sizes.small)
    model = make_model("", config, getattr(torch, sizes.dtype), torch.device(sizes.device), "sdpa")
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="?").save_pretrained(folder)


def _run(results: Results, sizes: Sizes, folder: Path) -> None:
    nano: Any = importlib.import_module("nanovllm")
    engine = nano.LLM(str(folder), enforce_eager=sizes.enforce_eager, max_model_len=_CONTEXT)
    shortest, longest = sizes.nano_tokens
    largest = min(_LARGEST_ID, SHAPES[sizes.small]["vocab_size"] - 1)
    for number in range(1, _RUNS + 1):
        seed(0)
        prompts = [[randint(0, largest) for _ in range(randint(shortest, longest))] for _ in range(sizes.nano_requests)]
        params = [
            nano.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(shortest, longest))
            for _ in prompts
        ]
        engine.generate(["Benchmark: "], nano.SamplingParams())
        torch.cuda.synchronize()
        started = time.monotonic()
        engine.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        tokens = sum(each.max_tokens for each in params)
        figures = {"seconds": seconds, "output_tokens_per_second": tokens / seconds}
        results.row("runs", shape=sizes.small, run=number, output_tokens=tokens, **figures)
