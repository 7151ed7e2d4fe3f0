"""Runs diffusers' own pipeline in closed batches, in the clock of `painting`.

A batch closes as LitServe closes one: when it is full, or when its first request has waited for the window. A pipeline
has one number of steps for a batch, so a batch runs once for each number that its pictures have.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tests.engine.paint_models import open_pipeline

_WINDOW_SECONDS: Final = 0.005  # the engine's default for Dynamic


def paint_batches(
    directory: Path, side: int, batch: int, arrivals: Sequence[float], steps: Sequence[int]
) -> tuple[list[float], float, float]:
    """Return the seconds from each arrival to its picture, those in all, and the mean number of pictures in a step.

    arrivals, steps: for each picture, in order of arrival.
    """
    pipeline, now, first, num_steps = open_pipeline(directory), 0.0, 0, 0
    seconds: list[float] = []
    while first < len(arrivals):
        full = arrivals[first + batch - 1] if first + batch <= len(arrivals) else float("inf")
        now = max(now, min(arrivals[first] + _WINDOW_SECONDS, full))
        members = [index for index in range(first, min(first + batch, len(arrivals))) if arrivals[index] <= now]
        began = time.process_time()
        for number in sorted({steps[index] for index in members}):
            same = [index for index in members if steps[index] == number]
            pipeline(
                ["a red circle"] * len(same),
                width=side,
                height=side,
                num_inference_steps=number,
                guidance_scale=7.5,
                generator=[torch.Generator().manual_seed(index) for index in same],
            )
            num_steps += number
        now += time.process_time() - began
        seconds += [now - arrivals[index] for index in members]
        first += len(members)
    return seconds, now, sum(steps) / num_steps
