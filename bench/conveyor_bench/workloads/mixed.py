"""Workload B: 64 requests of many lengths, against `generate` on batches of 32 in the order of arrival.

Only useful tokens count, because `generate` continues until the longest answer of its batch is done. The systems
alternate: the first runs for about a second, and the other until it has as many useful tokens.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from conveyor_bench.comparing import slices
from conveyor_bench.comparing.held import in_steps
from conveyor_bench.comparing.limit import Limit
from conveyor_bench.comparing.shares import measure_run, summarise_run
from conveyor_bench.comparing.slices import LIMIT, Slice
from conveyor_bench.comparing.systems import Conveyor, HfStatic, Workload
from conveyor_bench.comparing.turns import OURS, Beside, Progress
from conveyor_bench.workloads.rounds import Limits, Round, Sample, measure_rounds

REQUESTS, BATCH = 64, 32
INPUT_TOKENS, OUTPUT_TOKENS = (16, 256), (8, 128)  # shortest and longest; all lengths are equally likely


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how long its answer is."""

    prompt: list[int]
    output_tokens: int


Run = Generator[int, None, None]  # yields after each step how many useful tokens there are
Start = Callable[[Sequence[Request]], Run]


def measure_mixed(
    model: Path, dtype: str, vocab_size: int, limits: Limits, report: Callable[[str], None], *, profile: bool = False
) -> dict[str, Any]:
    """Measure both systems' useful tokens per second and their ratio.

    profile: also measure the times of the engine's parts, in another run.
    """
    sizes = Workload(BATCH, INPUT_TOKENS[1], OUTPUT_TOKENS[1])
    conveyor = Conveyor(model, dtype, sizes, report, max_num_queued_requests=REQUESTS)
    peer = HfStatic(model, dtype)
    systems: dict[str, Start] = {
        OURS: lambda requests: run_continuous(conveyor, requests),
        "hf-static": lambda requests: run_static(peer, requests),
    }
    warm = [Request([1] * INPUT_TOKENS[1], 2)] * 4
    for start in systems.values():
        list(start(warm))
    orders = cycle([list(systems), list(systems)[::-1]])
    limit = Limit(conveyor.runner).slice
    whole = measure_rounds(lambda n: one_round(systems, limit, random_requests(vocab_size, n), orders), limits, report)
    if profile:
        run = run_continuous(conveyor, random_requests(vocab_size, -1))
        whole["profile"] = summarise_run(measure_run(conveyor, run), limit(0).seconds)
    return {
        "output_tokens_per_second": _rate(whole["figures"]),
        **whole,
        "peers": {name: {"output_tokens_per_second": _rate(p["figures"]), **p} for name, p in whole["peers"].items()},
        "workload": {"requests": REQUESTS, "input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS},
    }


def _rate(figures: Mapping[str, float]) -> float:
    return round(1 / figures["seconds_per_token"], 2)


def random_requests(vocab_size: int, seed: int) -> list[Request]:
    """Return random requests, which arrive together, in this order."""
    random = Random(seed)

    def one() -> Request:
        prompt = random.choices(range(vocab_size), k=random.randint(*INPUT_TOKENS))
        return Request(prompt, random.randint(*OUTPUT_TOKENS))

    return [one() for _ in range(REQUESTS)]


def run_continuous(conveyor: Conveyor, requests: Sequence[Request]) -> Run:
    """Run all requests on the engine, which has 32 places."""
    for request in requests:
        conveyor.add(request.prompt, request.output_tokens)
    useful = 0
    for outputs in conveyor.steps():
        useful += sum(len(output.new_token_ids) for output in outputs)
        yield useful


def run_static(peer: HfStatic, requests: Sequence[Request]) -> Run:
    """Run one batch after the other, each until its longest answer is done."""
    useful = 0
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        longest = max(request.output_tokens for request in batch)
        for done in in_steps(peer.model, lambda: peer.generate([r.prompt for r in batch], longest)):  # noqa: B023
            useful += sum(request.output_tokens >= done for request in batch)
            yield useful


def one_round(
    systems: Mapping[str, Start], limit: Beside, requests: Sequence[Request], orders: Iterator[list[str]]
) -> Round:
    """Run the requests once on each system. Drop turns in which the host took too much time, if other turns remain."""
    total = sum(request.output_tokens for request in requests)
    runs = {name: Progress(start(requests)) for name, start in systems.items()}
    turns: list[dict[str, Slice]] = []
    while any(run.tokens < total for run in runs.values()):
        turns.append(_take_turn({name: runs[name] for name in next(orders)}, limit, total))
    quiet = [turn for turn in turns if all(part.counts for part in turn.values())]
    return {name: _sample([turn[name] for turn in quiet or turns if name in turn]) for name in [*systems, LIMIT]}


def _take_turn(runs: Mapping[str, Progress], limit: Beside, total: int) -> dict[str, Slice]:
    """Run the first unfinished system for a slice, and the other until it has as many tokens, if it has fewer."""
    turn: dict[str, Slice] = {}
    goal = total

    def is_there(tokens: int, spent: float) -> bool:
        return tokens >= goal or (not turn and spent >= slices.SLICE_SECONDS)

    for name, run in runs.items():
        if run.tokens < goal:
            turn[name] = run.slice(is_there)
            goal = next(runs[first].tokens for first in turn)
            if name == OURS:
                turn[LIMIT] = limit(turn[OURS].tokens)
    return turn


def _sample(parts: Sequence[Slice]) -> Sample:
    seconds = sum(part.seconds for part in parts)
    stolen = sum(part.stolen * part.seconds for part in parts) / seconds
    return Sample({"seconds_per_token": seconds / sum(part.tokens for part in parts)}, stolen)
