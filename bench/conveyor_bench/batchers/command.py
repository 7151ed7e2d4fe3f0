"""`python -m conveyor_bench batchers`: dynamic batchers over HTTP, with a model of BERT base's shape, in turns.

Each system has the same model, number type, threads and batch limit, and the same window where its users set one. The
rates are shares of the capacity of the slowest system. The objective is four times the time of a single request of 512
tokens to sentence-transformers behind FastAPI, which does not batch. In a round, each system is started, measured and
stopped once. Each round begins with another system. After each round, the medians over all rounds so far are written.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from conveyor_bench.batchers.client import TOKENS, Client, draw_text, summarise
from conveyor_bench.batchers.server import Absent, install, running
from conveyor_bench.batchers.systems import ALONE, SYSTEMS, Settings, System

SHARES: Final = (0.3, 0.6, 0.9, 1.2)
SATURATED: Final = "saturated"
OBJECTIVE_FACTOR: Final = 4.0
_COMPARED_TEXTS: Final = 4
_WARM_SECONDS: Final = 5.0

Figures = dict[str, float]


class Comparison:
    """The systems that can be measured here, their capacities, and the figures of the rounds so far."""

    def __init__(self, options: argparse.Namespace, model: Path, report: Callable[[str], None]) -> None:
        self._options, self._report = options, report
        self._settings = Settings(model, options.batch, options.window)
        self._right = compute_right(model)
        self._systems = [system for system in SYSTEMS if system.name in options.systems]
        self._rounds: dict[str, dict[str, list[Figures]]] = {}
        self.absent: dict[str, str] = {}
        self.capacities: dict[str, float] = {}
        self.lone_seconds: dict[str, float] = {}

    def install(self) -> None:
        """Install the environments of all systems."""
        for system in self._systems:
            self._report(f"event=installing system={system.name}")
            try:
                install(system, self._log(system))
            except Absent as error:
                self._drop(system, error)

    async def find_capacities(self) -> None:
        """Measure how many requests per second each system can answer, and how long a single request takes."""
        for system in list(self._systems):
            await self._visit(system, self._find_capacity)
        if not self._systems:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.absent.items())
            raise SystemExit(f"no system answers here: {reasons}")

    async def measure_round(self, number: int) -> None:
        """Measure all loads of each system."""
        turn = number % len(self._systems)
        for system in [*self._systems[turn:], *self._systems[:turn]]:
            await self._visit(system, partial(self._measure, number))

    @property
    def objective_seconds(self) -> float:
        """The objective for the latency of a request."""
        lone = self.lone_seconds.get(ALONE) or median(self.lone_seconds.values())
        return OBJECTIVE_FACTOR * lone

    def as_json(self) -> dict[str, Any]:
        """Return the results that are written to the file."""
        loads = {
            load: {
                name: {key: median(each[key] for each in found if key in each) for key in found[0]}
                for name, found in systems.items()
            }
            for load, systems in self._rounds.items()
        }
        rounds = min((len(found) for systems in self._rounds.values() for found in systems.values()), default=0)
        options = self._options
        return {
            "loads": loads,
            "absent": self.absent,
            "rounds": rounds,
            "objective_seconds": self.objective_seconds,
            "capacities": self.capacities,
            "lone_seconds": self.lone_seconds,
            "workload": {"model_shape": options.shape, "dtype": "float32", "tokens": TOKENS},
            "settings": {"threads": options.threads, "batch": options.batch, "window_seconds": options.window},
        }

    async def _visit(self, system: System, measure: Callable[[System, Client], Any]) -> None:
        try:
            async with running(system, self._settings, self._options.threads, self._right, self._log(system)) as client:
                await client.saturate(self._options.batch, _WARM_SECONDS, seed=0)
                await measure(system, client)
        except Absent as error:
            self._drop(system, error)

    async def _find_capacity(self, system: System, client: Client) -> None:
        answers = await client.saturate(self._options.batch, self._options.seconds, seed=1)
        rate = self.capacities[system.name] = summarise(answers, 0)["requests_per_second"]
        lone = self.lone_seconds[system.name] = await client.time_lone()
        self._report(f"event=capacity system={system.name} requests_per_second={rate:.2f} lone_ms={1000 * lone:.0f}")

    async def _measure(self, number: int, system: System, client: Client) -> None:
        slowest, seconds = min(self.capacities.values()), self._options.seconds
        for share in SHARES:
            rate = share * slowest
            enough = max(seconds, self._options.requests / rate)
            answers = await client.send_at(rate, enough, seed=100 * number + round(10 * share))
            self._keep(f"{share:.0%}", system, summarise(answers, self.objective_seconds))
        answers = await client.saturate(self._options.clients, seconds, seed=number)
        self._keep(SATURATED, system, summarise(answers, self.objective_seconds))

    def _keep(self, load: str, system: System, figures: Figures) -> None:
        self._rounds.setdefault(load, {}).setdefault(system.name, []).append(figures)
        text = " ".join(f"{name}={value:.3g}" for name, value in figures.items())
        self._report(f"event=measured system={system.name} load={load} {text}")

    def _drop(self, system: System, error: Absent) -> None:
        self.absent[system.name] = str(error)
        self._systems.remove(system)
        self._report(f"event=absent system={system.name} reason={json.dumps(str(error))}")

    def _log(self, system: System) -> Path:
        folder: Path = self._options.out.parent / "batchers"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{system.name}.log"


def compute_right(model: Path) -> list[tuple[str, list[float]]]:
    """Return a few texts and the vectors that sentence-transformers computes for them in this process."""
    from sentence_transformers import SentenceTransformer

    random = Random(1)
    texts = [draw_text(random) for _ in range(_COMPARED_TEXTS)]
    vectors = SentenceTransformer(str(model), device="cpu").encode(texts, show_progress_bar=False)
    return list(zip(texts, vectors.tolist(), strict=True))


def save_as_before(folder: Path) -> None:
    """Write the model's files in an older form, because infinity uses sentence-transformers 3.4.

    Most models on the hub have this form.
    """
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = "sentence_transformers.models." + module["type"].rpartition(".")[2]
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    written = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": TOKENS[1], "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True},
        "tokenizer_config.json": tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))


async def compare(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Measure all rounds. After each round the results so far are written to the file."""
    begin = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s {line}", file=sys.stderr, flush=True)

    comparison = Comparison(options, model, report)
    comparison.install()
    await comparison.find_capacities()
    for number in range(options.rounds):
        report(f"event=round number={number + 1} of={options.rounds}")
        await comparison.measure_round(number)
        options.out.write_text(json.dumps(comparison.as_json(), indent=1) + "\n")
    return comparison.as_json()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench batchers", description=__doc__)
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--shape", choices=["bert-base", "tiny"], default="bert-base", help="of the model")
    parser.add_argument("--rounds", type=int, default=5, help="of each load (default 5)")
    parser.add_argument("--seconds", type=float, default=15.0, help="that a load lasts at least (default 15)")
    parser.add_argument("--requests", type=int, default=20, help="that a rate sends at least, on average (default 20)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each system (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="requests in a batch, at most (default 32)")
    parser.add_argument("--window", type=float, default=0.01, help="of a batch, in seconds (default 0.01)")
    parser.add_argument("--clients", type=int, default=16, help="that saturate a system at once (default 16)")
    parser.add_argument("--out", type=Path, default=Path("build/batchers.json"), help="the file of the results")
    return parser


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `batchers`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    counts = ("rounds", "seconds", "requests", "threads", "batch", "clients")
    if any(getattr(options, name) <= 0 for name in counts):
        parser.error(f"{', '.join(f'--{name}' for name in counts)} must be above 0")
    if find_spec("sentence_transformers") is None:
        raise SystemExit("sentence-transformers is missing: make batchers")
    from conveyor_bench.workloads.encoder import write_encoder

    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        write_encoder(Path(folder), options.shape)
        save_as_before(Path(folder))
        print(json.dumps(asyncio.run(compare(options, Path(folder)))))
    return 0
