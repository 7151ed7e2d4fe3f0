"""Runs systems in turns with the same workload until the figures have settled. Used for the command `engine`.

In a turn, the first system runs for about a second, until the end of a step. Then each of the others runs until
every request has as many tokens as with the first. The order alternates. A slice ends only when every request has at
least one more token. So the whole prefill is one slice, however long it takes.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from conveyor_bench.comparing import slices
from conveyor_bench.comparing.slices import LIMIT, Phase, Slice, Turn, pool, ratio, seconds
from conveyor_bench.comparing.systems import Prompts, System, Workload

OURS = "conveyor"
Beside = Callable[[int], Slice]  # called with the tokens of each slice of this engine; returns the limit's slice


class Progress:
    """The run of a system, and how many tokens every request has at least."""

    def __init__(self, run: Generator[int, None, Any]) -> None:
        self.tokens = 0
        self._run = run

    def slice(self, reached: Callable[[int, float], bool]) -> Slice:
        """Run at least one step, until `reached(tokens, seconds of this slice)` is true."""
        before, processors = self.tokens, processor_ticks()
        started = now = time.perf_counter()
        while self.tokens == before or not reached(self.tokens, now - started):
            self.tokens = next(self._run)
            now = time.perf_counter()
        return Slice(self.tokens - before, now - started, stolen_share(processors, processor_ticks()))

    def finish(self) -> Prompts:
        """Return the outputs. Call when the run has made all tokens."""
        try:
            next(self._run)
        except StopIteration as stop:
            outputs: Prompts = stop.value
            return outputs
        raise AssertionError("the run makes more tokens than asked")


def processor_ticks() -> list[int]:
    """Return the time of all processors since boot: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the share of the processors' time between two readings that the host gave to other machines (steal)."""
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return spent[7] / max(1, sum(spent))


def random_prompts(count: int, lengths: Sequence[int], vocab_size: int, seed: int) -> Prompts:
    """Return `count` prompts of random tokens. Their lengths cycle through `lengths`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


def measure(systems: Mapping[str, System], limit: Beside, workload: Workload, vocab_size: int, rounds: int,
            budget_seconds: float, report: Callable[[str], None]) -> list[list[Turn]]:  # fmt: skip
    """Return the turns of each round. Each round runs the whole workload with new prompts.

    Stops when the figures have settled, or when a round as long as the longest so far would exceed the budget.
    """
    orders = cycle([list(systems), list(systems)[::-1]])
    begun, longest = time.monotonic(), 0.0
    measured: list[list[Turn]] = []
    while len(measured) < rounds and not settled(pool(measured), workload):
        started = time.monotonic()
        if measured and started - begun + longest > budget_seconds:
            report(f"event=budget_spent rounds={len(measured)} of={rounds}")
            break
        prompts = random_prompts(workload.requests, (workload.input_tokens,), vocab_size, seed=len(measured))
        measured.append(list(one_round(systems, limit, prompts, workload.output_tokens, orders)))
        longest = max(longest, time.monotonic() - started)
        report(
            f"event=measured round={len(measured)} "
            + " ".join(_describe(measured[-1], name) for name in [*systems, LIMIT])
        )
    return measured


def one_round(
    systems: Mapping[str, System], limit: Beside, prompts: Prompts, output_tokens: int, orders: Iterator[list[str]]
) -> Iterator[Turn]:
    """Run the workload once on all systems. Raises an error if a system generates too few or too many tokens."""
    runs = {name: Progress(system.start(prompts, output_tokens)) for name, system in systems.items()}
    while any(run.tokens < output_tokens for run in runs.values()):
        yield take_turn({name: runs[name] for name in next(orders)}, limit, output_tokens)
    for run in runs.values():
        assert [len(row) for row in run.finish()] == [output_tokens] * len(prompts)


def take_turn(runs: Mapping[str, Progress], limit: Beside, output_tokens: int) -> Turn:
    """Run the first of `runs` for a slice or to the end of its phase. Then run the others to as many tokens."""
    first, goal = next(iter(runs)), output_tokens
    phase: Phase = "decode" if runs[first].tokens else "prefill"
    parts: dict[str, Slice] = {}

    def is_there(tokens: int, spent: float) -> bool:
        return tokens >= goal or (not parts and (tokens == 1 or spent >= slices.SLICE_SECONDS))

    for name, run in runs.items():
        parts[name] = run.slice(is_there)
        goal = runs[first].tokens
        if name == OURS:
            parts[LIMIT] = limit(parts[name].tokens)
    return Turn(phase, parts)


def settled(turns: Sequence[Turn], workload: Workload) -> bool:
    """Return whether the spread of each ratio to a peer is small enough; without peers, the spread of our time."""
    peers = [name for name in turns[0].slices if name not in (OURS, LIMIT)] if turns else []
    ratios = [ratio(turns, OURS, peer, workload.output_tokens) for peer in peers]
    pairs = ratios or [seconds(turns, OURS, workload.output_tokens)]
    return all(found is not None and found.settled for found in pairs)


def _describe(turns: Sequence[Turn], name: str) -> str:
    parts = [turn.slices[name] for turn in turns]
    spent, num_dropped = sum(part.seconds for part in parts), sum(not part.counts for part in parts)
    return f"{name}_seconds={spent:.2f} {name}_slices={len(parts)} {name}_dropped={num_dropped}"
