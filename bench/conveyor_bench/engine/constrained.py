"""`python -m conveyor_bench constrained`: tokens per second of rows that follow a JSON schema, and of free rows.

In each round, both kinds of rows decode in turns, on a model with random weights and the vocabulary size of its shape.
The median of the rounds' ratios shows the cost of masks. The last line printed is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import write_model
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.masks.client import Masks
from conveyor_engine.masks.grammars import Grammars
from conveyor_engine.masks.verdicts import key_of
from conveyor_engine.text.grammar import build_grammar
from conveyor_engine.wire.request import EngineRequest, SamplingParams

_PROMPT_TOKENS = 16
_LONGEST_PIECE = 12  # characters
_SCHEMA = {  # no answer of a measurement is long enough to end the array
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["a tool", "a call", "an answer"]},
            "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE with random merges (seed 0). Most pieces are letters, some with a space before them."""
    random = Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    pieces, letters, merges = list(alphabet), [*"abcdefghijklmnopqrstuvwxyz\u0120"], list[tuple[str, str]]()
    words = list(letters)
    while len(vocabulary) < vocab_size:
        source = words if random.random() < 0.9 else pieces
        left, right = random.choice(source), random.choice(source)
        whole = left + right
        if whole in vocabulary or len(whole) > _LONGEST_PIECE or "\u0120" in whole[1:]:
            continue
        vocabulary[whole] = len(vocabulary)
        merges.append((left, right))
        source.append(whole)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def open_core(folder: Path, rows: int, tokens: int, dtype: str) -> EngineCore:
    """Return an engine for the model in the folder."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
        max_model_len=_PROMPT_TOKENS + tokens,
        max_num_seqs=rows,
        num_threads=torch.get_num_threads(),
    )
    runner = build_runner(config)
    facts = runner.facts
    masks = Masks(folder / "tokenizer.json", facts.vocab_size, facts.eos_token_ids, rows, lambda: None)
    return EngineCore(config, runner, grammars=Grammars(masks, facts.vocab_size, facts.eos_token_ids))


def compile_grammar(core: EngineCore, grammar: str) -> None:
    """Wait until the grammar is compiled."""
    assert core.grammars is not None
    while (verdict := core.grammars.judge(key_of(grammar), grammar)) is None:
        time.sleep(0.01)
    if verdict.problem:
        raise RuntimeError(verdict.problem)


def measure_rate(core: EngineCore, rows: int, tokens: int, grammar: str, serial: int) -> float:
    """Return the tokens per second while all rows decode, after every row has its first token.

    So the compilation of the grammar is not part of the time.
    """
    random = Random(serial)
    for row in range(rows):
        prompt = [random.randrange(256) for _ in range(_PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=serial * rows + row, ignore_eos=True)
        core.add_request(
            EngineRequest(request_id=f"{serial}-{row}", prompt_token_ids=prompt, params=params, grammar=grammar)
        )
    begun, num_tokens, started = set[str](), 0, 0.0
    while core.has_unfinished():
        outputs = core.step(time.monotonic())
        if started:
            num_tokens += sum(len(output.new_token_ids) for output in outputs)
        begun |= {output.request_id for output in outputs if output.new_token_ids}
        if not started and len(begun) == rows:
            started = time.perf_counter()
        for output in outputs:
            if output.has_failed:
                raise RuntimeError(f"request {output.request_id} ended with {output.finish_reason}: {output.message}")
    return num_tokens / (time.perf_counter() - started)


def measure(
    shape: str, dtype: str, rows: int, tokens: int, rounds: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the median rates, and the median of the rounds' ratios. The first round is not counted."""
    grammar, pairs = build_grammar("json", _SCHEMA, "schema").text, list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, shape, getattr(torch, dtype))
        write_tokenizer(folder, SHAPES[shape]["vocab_size"])
        core, serials = open_core(folder, rows, tokens, dtype), itertools.count()
        compile_grammar(core, grammar)
        for number in range(rounds + 1):
            order = ("", grammar) if number % 2 else (grammar, "")
            rates = {each: measure_rate(core, rows, tokens, each, next(serials)) for each in order}
            if number:
                pairs.append((rates[""], rates[grammar]))
                report(f"event=measured free={rates['']:.1f} constrained={rates[grammar]:.1f} unit=tokens_per_second")
    return {
        "constrained_of_free": round(statistics.median(constrained / free for free, constrained in pairs), 3),
        "free_tokens_per_second": round(statistics.median(free for free, _ in pairs), 1),
        "constrained_tokens_per_second": round(statistics.median(constrained for _, constrained in pairs), 1),
        "rows": rows, "tokens": tokens, "rounds": rounds, "model_shape": shape, "dtype": dtype,
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `constrained`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench constrained", description=__doc__)
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-0.6b", help="the model's sizes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of its weights")
    parser.add_argument("--rows", type=int, default=32, help="requests that decode at once")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="each measures free rows and constrained ones")
    arguments = parser.parse_args(argv)
    for name, least in (("rows", 1), ("tokens", 2), ("rounds", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}")
    report = partial(print, flush=True)
    sizes = (arguments.rows, arguments.tokens, arguments.rounds)
    report(json.dumps(measure(arguments.model_shape, arguments.dtype, *sizes, report)))
    return 0
