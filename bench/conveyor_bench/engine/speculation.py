"""`python -m conveyor_bench speculation`: tokens per second of answers with drafts and without, in turns.

Seconds are those of the processor, on one thread, so that other programs on the machine count little.

The answers are given. The model, with random weights, computes and samples each step as usual, and then the tokens are
replaced by those of the answer. So a step costs what it costs, and drafts are accepted as often as in such a text:

    edit     a part of Python's standard library with a name changed; the prompt has the original
    extract  the sentences of a page that have a certain word; the prompt has the page
    chat     the beginning of a page of Python's manual; the prompt is the question
    random   random tokens, of which no draft is accepted

Tokens are words and marks. With `--model`, a model's own greedy answers to questions take the place of these.

With `--draft-shape`, a draft model with random weights computes the guesses. Then so many of them are replaced by the
answer's tokens as `--right` says, and the others by wrong tokens. With `--model` and `--draft`, a draft model guesses.
With `--train-head`, an EAGLE-3 head guesses, which is trained first.
The last line printed is one JSON object.
"""

import argparse
import inspect
import itertools
import json
import re
import statistics
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import torch

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import write_model
from conveyor_bench.engine.train_head import train_head
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.execution.sampling.sampler import Sampled
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Sample
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, SamplingParams
from conveyor_engine.wire.step import StepPlan

PROMPT_TOKENS, ANSWER_TOKENS = 400, 100
MODULES = ("textwrap", "shlex", "string", "fnmatch", "heapq", "bisect", "copy", "csv", "difflib", "glob", "gzip")
PAGES = sorted(name for name, page in topics.items() if len(page) > 2000)
Text = tuple[list[int], list[int]]  # tokens of a prompt and of its answer


class Words:
    """Turns texts into tokens: words and marks, each with the space before it."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        parts = re.findall(r" ?\w+| ?[^\w\s]|\s+", text)
        return [self._numbers.setdefault(part, len(self._numbers)) % self.vocab_size for part in parts]


def edit(words: Words, number: int) -> Text:
    source = inspect.getsource(import_module(MODULES[number % len(MODULES)]))
    lines = source.splitlines(keepends=True)
    begin = Random(number).randrange(max(1, len(lines) - 25))
    part = "".join(lines[begin : begin + 25])
    ((name, _),) = Counter(re.findall(r"\b[a-z_]{4,}\b", part)).most_common(1)
    changed = re.sub(rf"\b{name}\b", f"{name}_of_it", part)
    return words.encode(f"{part}\nRename {name} to {name}_of_it."), words.encode(changed)


def extract(words: Words, number: int) -> Text:
    page = " ".join(topics[PAGES[number % len(PAGES)]][:1200].split())
    sentences = re.split(r"(?<=[.:]) ", page)
    ((name, _),) = Counter(re.findall(r"\b[a-z]{6,}\b", page)).most_common(1)
    found = "".join(f"- {sentence}\n" for sentence in sentences if name in sentence)
    return words.encode(f"{page}\nList the sentences about {name}."), words.encode(found)


def chat(words: Words, number: int) -> Text:
    name = PAGES[number % len(PAGES)]
    return words.encode(f"Tell me about {name} in Python."), words.encode(textwrap.dedent(topics[name]))


def chance(words: Words, number: int) -> Text:
    random = Random(number)
    prompt, answer = ([random.randrange(words.vocab_size) for _ in range(number)] for number in (200, ANSWER_TOKENS))
    return prompt, answer


CASES: dict[str, Callable[[Words, int], Text]] = {"edit": edit, "extract": extract, "chat": chat, "random": chance}


class Given:
    """A runner whose rows get the tokens of given texts in place of the sampled ones."""

    def __init__(self, runner: Any, rows: int, length: int) -> None:
        self._runner, self.facts = runner, runner.facts
        self.extra_warmup_tokens, self.graph_sizes = runner.extra_warmup_tokens, runner.graph_sizes
        self.free_memory = runner.free_memory
        self.texts: dict[tuple[int, ...], list[int]] = {}  # by the prompt
        self._tokens = torch.zeros((rows, length), dtype=torch.int64)
        self._sample = runner._sampler.sample
        runner._sampler.sample = self._replace
        self.right, self._random = 0.0, Random(0)  # the share of a draft model's guesses that are right
        if runner._draft is not None:
            self._guess, self._lag = runner._draft._guess, runner._draft.lag
            runner._draft._guess = self._guess_given

    def begin(self, plan: StepPlan) -> Sample:
        for admitted in plan.admitted:
            assert admitted.sampling is not None
            prompt = tuple(admitted.token_ids[: admitted.sampling.num_prompt_tokens])
            if text := self.texts.get(prompt, []):
                self._tokens[admitted.row, : len(text)] = torch.tensor(text)
        begun: Sample = self._runner.begin(plan)
        return begun

    def _guess_given(self, readings: Sequence[tuple[int, int, int]], rows: Any, *, is_first: bool) -> torch.Tensor:
        """Return guesses of which the share `right` is right."""
        self._guess(readings, rows, is_first=is_first)
        answer = torch.stack([self._tokens[row, first + number + self._lag] for row, first, number in readings])
        return answer + torch.tensor([self._random.random() >= self.right for _ in readings])

    def _replace(self, logits: torch.Tensor, samples: Any, *rest: Any) -> Sampled:
        sampled: Sampled = self._sample(logits, samples, *rest)
        return replace(sampled, token_ids=self._tokens[samples.device_rows, samples.device_positions])


def measure(core: EngineCore, texts: Sequence[Text], serials: Any) -> float:
    """Return the tokens per second of the answers, after every request has its first token."""
    for prompt, answer in texts:
        params = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        core.add_request(EngineRequest(request_id=str(next(serials)), prompt_token_ids=prompt, params=params))
    begun, num_tokens, started = set[str](), 0, 0.0
    while core.has_unfinished():
        outputs = core.step(time.monotonic())
        if started:
            num_tokens += sum(len(output.new_token_ids) for output in outputs)
        begun |= {output.request_id for output in outputs if output.new_token_ids}
        if not started and len(begun) == len(texts):
            started = time.process_time()
        if failed := next((output for output in outputs if output.has_failed), None):
            raise RuntimeError(f"request {failed.request_id} ended with {failed.finish_reason}: {failed.message}")
    return num_tokens / (time.process_time() - started)


def run_rounds(
    cores: dict[str, EngineCore], build: Callable[[int], list[Text]], rounds: int, report: Callable[[str], None]
) -> dict[str, float]:
    """Return the medians of both rates, and of their ratios."""
    serials, rates = itertools.count(), list[dict[str, float]]()
    for number in range(rounds + 1):
        texts = build(number)
        order = list(cores) if number % 2 else list(reversed(cores))
        found = {name: measure(cores[name], texts, serials) for name in order}
        if number:  # the first round warms up
            rates.append(found)
            report(f"event=measured rows={len(texts)} " + " ".join(f"{name}={found[name]:.1f}" for name in cores))
    results = {name: round(statistics.median(each[name] for each in rates), 1) for name in cores}
    return results | {"ratio": round(statistics.median(each["drafts"] / each["plain"] for each in rates), 3)}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `speculation`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench speculation", description=__doc__)
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-0.6b", help="the model's sizes")
    parser.add_argument("--model", type=Path, help="a chat model with weights, which answers itself")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of its weights")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--rows", default="1,8,32", help="requests at once; comma-separated")
    parser.add_argument("--max-tokens", type=int, default=8, help="most drafts of a request in a step")
    parser.add_argument("--draft-shape", choices=SHAPES, help="a draft model with random weights of these sizes")
    parser.add_argument("--right", default="0,0.5,0.8,1", help="shares of its guesses that are right; comma-separated")
    parser.add_argument("--draft", type=Path, help="a draft model for the one of --model")
    parser.add_argument("--train-head", type=int, help="so many steps train an EAGLE-3 head for --model, which guesses")
    parser.add_argument("--rounds", type=int, default=5, help="each measures with drafts and without")
    arguments = parser.parse_args(argv)
    rows, cases = [int(each) for each in arguments.rows.split(",")], arguments.cases.split(",")
    if unknown := {*cases} - {*CASES}:
        parser.error(f"--cases has {unknown.pop()!r}, which is none of {', '.join(CASES)}")
    if min(*rows, arguments.rounds) < 1:
        parser.error("--rows and --rounds must be at least 1")
    if (arguments.draft or arguments.train_head) and not arguments.model:
        parser.error("--draft and --train-head need --model")
    if arguments.draft_shape and arguments.model:
        parser.error("--draft-shape is for models with random weights")
    report = partial(print, flush=True)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model, draft = arguments.model or Path(name) / "model", arguments.draft
        if arguments.model is None:
            write_model(model, arguments.model_shape, getattr(torch, arguments.dtype))
        if arguments.draft_shape is not None:
            draft = Path(name) / "draft"
            dtype, vocab_size = getattr(torch, arguments.dtype), SHAPES[arguments.model_shape]["vocab_size"]
            write_model(draft, arguments.draft_shape, dtype, vocab_size)
        if arguments.train_head is not None:
            draft = Path(name) / "head"
            train_head(model, draft, arguments.train_head, PAGES)
        config = EngineConfig(
            model=str(model),
            device="cpu",
            dtype=arguments.dtype,
            max_model_len=None if arguments.model else PROMPT_TOKENS + ANSWER_TOKENS,
            max_num_seqs=max(rows),
            prefix_caching=False,  # two schedulers take turns with one cache
            speculation="ngram" if draft is None else "draft",
            draft_model=None if draft is None else str(draft),
            speculation_tokens=arguments.max_tokens,
            num_threads=1,
        )
        runner: Any = build_runner(config)
        given = Given(runner, max(rows), PROMPT_TOKENS + ANSWER_TOKENS + 1) if arguments.model is None else None
        executor = given or runner
        plain = EngineCore(replace(config, speculation=None), executor)
        words = Words(runner.facts.vocab_size)
        if arguments.draft_shape is not None:
            cases = [f"{share} right" for share in arguments.right.split(",")]
        for case, number_of_rows in itertools.product(cases if given else ["own answers"], rows):

            def build(number: int, case: str = case, num_rows: int = number_of_rows) -> list[Text]:
                numbers = range(number * num_rows, (number + 1) * num_rows)
                if given is None:
                    return ask(Tokenizer(model), numbers)
                given.right = float(case.split()[0]) if case not in CASES else 0.0
                make = CASES.get(case, chance)
                texts = [(p[-PROMPT_TOKENS:], a[:ANSWER_TOKENS]) for p, a in (make(words, n) for n in numbers)]
                given.texts = {tuple(prompt): prompt + answer for prompt, answer in texts}
                return texts

            cores = {"plain": plain, "drafts": EngineCore(replace(config, warmup=False), executor)}
            results[f"{case}, {number_of_rows}"] = found = run_rounds(cores, build, arguments.rounds, report)
            report(f"event=case case={case!r} rows={number_of_rows} {found}")
            stats = cores["drafts"].stats()
            report(f"event=drafts computed={stats.num_draft_tokens} accepted={stats.num_accepted_tokens}")
    report(json.dumps(results | {"options": {name: str(value) for name, value in vars(arguments).items()}}))
    return 0


def ask(tokenizer: Tokenizer, numbers: Sequence[int]) -> list[Text]:
    """Return questions about pages of Python's manual, with answers of as many tokens, whichever these will be."""
    questions = [f"<|user|>Tell me about {PAGES[number % len(PAGES)]}.<|assistant|>" for number in numbers]
    return [(tokenizer.encode(question, PROMPT_TOKENS), [0] * ANSWER_TOKENS) for question in questions]
