"""Checks that systems generate the right tokens, before anything is measured. Called by `engine.command`.

With a small float32 model, all systems must generate the same greedy tokens. The measured model is checked in its own
dtype, where rounding may decide between two tokens that are almost equally likely. So transformers computes, in
float32, the logits for the tokens that a system has generated. Each of these tokens must be almost the likeliest at its
position.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import Conveyor, Prompts, System, Workload, generate, write_model
from conveyor_bench.comparing.turns import random_prompts

GAP_AT_MOST = 0.1  # from a token's logit to the largest logit, in standard deviations of the position's logits
CHECKED_TOKENS = 8  # of each request, at most

Open = Callable[[Path, str], System]


def check_tokens(peers: Mapping[str, Open]) -> tuple[int, int]:
    """Compare the greedy tokens of a small float32 model. Exits if the systems differ.

    Returns the number of compared tokens and the number of distinct tokens among them.
    """
    with TemporaryDirectory() as folder:
        write_model(Path(folder), "tiny", torch.float32)
        prompts = random_prompts(8, (24, 7, 1, 40), SHAPES["tiny"]["vocab_size"], seed=1)
        ours = generate(Conveyor(Path(folder), "float32", Workload(8, 40, 32), lambda _: None), prompts, 32)
        for name, open_peer in peers.items():
            _refuse_difference(name, ours, generate(open_peer(Path(folder), "float32"), prompts, 32))
    return sum(map(len, ours)), len({token for row in ours for token in row})


def _refuse_difference(peer: str, ours: Prompts, theirs: Prompts) -> None:
    rows = [row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if rows:
        raise SystemExit(f"float32 tokens differ from {peer}'s in requests {rows}: one of them is wrong here")


def check_gaps(model: Path, systems: Mapping[str, System], prompts: Prompts, output_tokens: int) -> dict[str, float]:
    """Return the largest gap of each system. Exits if a gap is too large. This also warms the systems up."""
    outputs = {name: generate(system, prompts, min(CHECKED_TOKENS, output_tokens)) for name, system in systems.items()}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    gaps = {name: max(map(_gap, [reference] * len(rows), prompts, rows)) for name, rows in outputs.items()}
    wrong = [name for name, gap in gaps.items() if gap > GAP_AT_MOST]
    if wrong:
        raise SystemExit(f"tokens of {wrong} are not the likeliest for transformers: gaps {gaps}")
    return gaps


def _gap(reference: PreTrainedModel, prompt: list[int], row: list[int]) -> float:
    """Return the largest difference between a position's largest logit and the logit of its chosen token.

    The unit is the standard deviation of the position's logits.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + row[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(row)[:, None])[:, 0]
    return float(((logits.amax(1) - chosen) / logits.std(1)).max())
