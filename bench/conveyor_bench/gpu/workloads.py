"""Makes the stages' requests, runs them through an EngineCore, and computes the least time that they could take."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_bench.gpu.device import Ceilings
from conveyor_bench.gpu.sizes import Batch, Sizes
from conveyor_engine.execution.kernels.slot_cache import slot_bytes
from conveyor_engine.execution.models.packed_linear import PackedLinear
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, FinishReason, SamplingParams

_NANO_VOCABULARY = 10_000
Lengths = Sequence[tuple[int, int]]  # tokens of each prompt and of its answer


def nano_requests(sizes: Sizes, vocab_size: int) -> list[EngineRequest]:
    """Return the requests of nano-vllm's bench.py: prompts and answers of random lengths, temperature 0.6, seed 0."""
    random, (shortest, longest) = Random(0), sizes.nano_tokens
    largest = min(_NANO_VOCABULARY, vocab_size - 1)
    prompts = [
        [random.randint(0, largest) for _ in range(random.randint(shortest, longest))]
        for _ in range(sizes.nano_requests)
    ]
    return [_request(str(n), prompt, random.randint(shortest, longest), 0.6) for n, prompt in enumerate(prompts)]


def batch_requests(batch: Batch, vocab_size: int, name: str = "") -> list[EngineRequest]:
    """Return greedy requests of one size. A different `name` gives different prompts."""
    random = Random(name)
    prompts = ([random.randrange(vocab_size) for _ in range(batch.input_tokens)] for _ in range(batch.requests))
    return [_request(f"{name}{n}", prompt, batch.output_tokens, 0.0) for n, prompt in enumerate(prompts)]


def _request(request_id: str, prompt: list[int], max_tokens: int, temperature: float) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params)


def lengths_of(requests: Sequence[EngineRequest]) -> Lengths:
    """Return the lengths of requests and of their answers."""
    lengths = ((len(r.prompt_token_ids), r.params) for r in requests)
    return [(length, params.max_tokens) for length, params in lengths if params is not None]


@dataclass(slots=True)
class Run:
    """The times of a run, in seconds since its requests were added."""

    seconds: float
    output_tokens: int
    num_steps: int
    first_token: float  # when the first request had its first token
    last_first_token: float  # when the last request had its first token


def run_requests(core: EngineCore, requests: Sequence[EngineRequest]) -> Run:
    """Run all requests at once to their ends. Raises RuntimeError if one ends early."""
    steps_before, started = core.stats().num_steps, time.monotonic()
    for request in requests:
        core.add_request(request)
    firsts: dict[str, float] = {}
    num_tokens = 0
    while core.has_unfinished():
        outputs = core.step(time.monotonic())
        now = time.monotonic() - started
        for output in outputs:
            if output.finish_reason not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"a request ended with {output.finish_reason}: {output.message}")
            num_tokens += len(output.new_token_ids)
            firsts.setdefault(output.request_id, now)
    seconds = time.monotonic() - started
    assert num_tokens == sum(answer for _, answer in lengths_of(requests))
    num_steps = core.stats().num_steps - steps_before
    return Run(seconds, num_tokens, num_steps, min(firsts.values()), max(firsts.values()))


def least_seconds(
    model: PreTrainedModel, lengths: Lengths, ceilings: Ceilings, kv_dtype: torch.dtype | None = None
) -> tuple[float, float]:
    """Return the least seconds of (prompts, decodes): products, and reads of weights and KV cache, at maximum speed.

    Assumes that all requests are there from the start and that no step is limited. A step of decodes takes as long as
    its reads (each weight once, and each row's keys and values) or as its products, whichever is longer. Nothing else
    counts. kv_dtype: the type of the KV cache; default: the model's.
    """
    config = model.config.get_text_config()
    itemsize = model.dtype.itemsize
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear | PackedLinear))
    head = model.get_output_embeddings().weight.numel()
    of_a_layer = slot_bytes(config.num_key_value_heads, config.head_dim, kv_dtype or model.dtype)
    kv_bytes = 2 * config.num_hidden_layers * of_a_layer
    prompts, answers = (np.array(column) for column in zip(*lengths, strict=True))
    products = 2 * (weights - head) * prompts.sum() + 2 * head * len(prompts)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * (prompts**2).sum()
    decodes = 0.0
    for step in range(1, int(answers.max())):  # each row's input is the token with this number in its answer
        alive = answers > step
        read = weights * itemsize + kv_bytes * (prompts[alive] + step).sum()
        decodes += max(read / ceilings.bytes_per_second, 2 * weights * alive.sum() / ceilings.flops)
    return float((products + attention) / ceilings.flops), float(decodes)
