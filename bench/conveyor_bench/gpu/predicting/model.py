"""The time model of nano-vllm's bench: how long each part of a step takes on the device and on the host. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from conveyor_bench.gpu.predicting.constants import (
    BATCHED_TOKENS,
    GRAPH_ROWS,
    LAUNCHES_BESIDE_LAYERS,
    LAUNCHES_OF_A_LAYER,
    Kernels,
    Part,
    Shape,
)

_TAILS_EVERY = 50  # steps: the tails change slowly
Parts = dict[str, float]


class Chunk(NamedTuple):
    """Tokens of a prompt in one step."""

    tokens: int
    context: int  # tokens of the prompt up to the end of this chunk


@dataclass(slots=True)
class Row:
    """A request that has its first token."""

    context: int
    missing: int  # tokens that it does not have yet


@dataclass(frozen=True, slots=True)
class System:
    """A GPU with its kernels, and a model's shape.

    efficiency: returns the share of a copy's bandwidth that decode attention reaches over these contexts.
    """

    part: Part
    shape: Shape
    kernels: Kernels
    key_bytes: int  # of a key and a value of one head
    efficiency: Callable[[Sequence[int]], float]


@dataclass(slots=True)
class Prediction:
    """The predicted time of the bench. parts: the seconds of each part, and of the device's waits for the host."""

    output_tokens: int
    seconds: float = 0.0
    num_steps: int = 0
    parts: Parts = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def draw_lengths() -> list[tuple[int, int]]:
    """Return the tokens of each prompt and answer of nano-vllm's bench.py (seed 0)."""
    random = Random(0)
    prompts = [len([random.randint(0, 10_000) for _ in range(random.randint(100, 1024))]) for _ in range(256)]
    return [(length, random.randint(100, 1024)) for length in prompts]


def predict(system: System, lengths: Sequence[tuple[int, int]]) -> Prediction:
    """Run all requests at once in virtual time, as the scheduler does. During a step, the host plans the next one."""
    waiting = [(prompt, prompt, answer) for prompt, answer in reversed(lengths)]  # tokens: prompt, not computed, answer
    rows: list[Row] = []
    found = Prediction(sum(answer for _, answer in lengths))
    efficiency = 1.0
    while waiting or rows:
        chunks, begun = _admit(waiting, BATCHED_TOKENS - len(rows))
        if rows and (chunks or found.num_steps % _TAILS_EVERY == 0):
            efficiency = system.efficiency([row.context + 1 for row in rows])
        device = time_step(system, [row.context + 1 for row in rows], chunks, efficiency)
        host = _time_host(system.kernels, len(rows) + len(chunks), is_eager=bool(chunks))
        device["waiting for the host"] = max(0.0, host - sum(device.values()))
        for name, milliseconds in device.items():
            found.parts[name] = found.parts.get(name, 0.0) + milliseconds / 1000
        found.seconds += sum(device.values()) / 1000
        found.num_steps += 1
        for row in rows:
            row.context += 1
        rows += begun
        for row in rows:
            row.missing -= 1
        rows = [row for row in rows if row.missing > 0]
    return found


def _admit(waiting: list[tuple[int, int, int]], room: int) -> tuple[list[Chunk], list[Row]]:
    """Take prompts, or parts of them, for this many tokens. Returns their chunks, and the rows of complete prompts."""
    chunks, begun = [], []
    while waiting and room > 0:
        prompt, missing, answer = waiting.pop()
        tokens = min(missing, room)
        chunks.append(Chunk(tokens, prompt - missing + tokens))
        room -= tokens
        if tokens == missing:
            begun.append(Row(prompt, answer))
        else:
            waiting.append((prompt, missing - tokens, answer))
    return chunks, begun


def time_step(system: System, contexts: Sequence[int], chunks: Sequence[Chunk], efficiency: float) -> Parts:
    """Return the milliseconds of each part on the device. contexts: one for each decode."""
    shape, part, kernels = system.shape, system.part, system.kernels
    tokens = len(contexts) + sum(chunk.tokens for chunk in chunks)
    padded = tokens if chunks else next(size for size in GRAPH_ROWS if size >= tokens)
    entries = len(contexts) + len(chunks) if chunks else padded
    qkv, out = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim
    products = ((qkv, shape.hidden), (shape.hidden, out), (2 * shape.intermediate, shape.hidden),
                (shape.hidden, shape.intermediate))  # fmt: skip
    moved = 2 * tokens * (8 * shape.hidden + 2 * qkv + 3 * shape.intermediate)
    read = sum(contexts) * shape.kv_heads * system.key_bytes
    attended = sum(4 * out * chunk.tokens * (chunk.context - chunk.tokens / 2) for chunk in chunks)
    logits = entries * shape.vocabulary * 2
    of_a_layer = {
        "products": sum(_time_product(padded, n, k, part) for n, k in products),
        "norms, heads, activation": max(4 * kernels.small_kernel_us, moved / part.bytes_per_second / 0.8 * 1e6),
        "decode attention": read / (part.bytes_per_second * efficiency) * 1e6 + kernels.attention_us if contexts else 0,
        "prompt attention": attended / (part.flops * kernels.prompt_flops) * 1e6 + 6 if chunks else 0,
    }
    gaps = (LAUNCHES_OF_A_LAYER * shape.layers + LAUNCHES_BESIDE_LAYERS) * kernels.gap_us
    return {
        **{name: shape.layers * microseconds / 1000 for name, microseconds in of_a_layer.items()},
        "gaps": gaps / 1000,
        "head": _time_product(entries, shape.vocabulary, shape.hidden, part) / 1000,
        "sampling": (kernels.logits_copies * logits / part.bytes_per_second * 1e6 + kernels.sample_us) / 1000,
    }


def _time_host(kernels: Kernels, rows: int, *, is_eager: bool) -> float:
    return kernels.host_ms + kernels.host_row_ms * rows + (kernels.eager_ms if is_eager else 0)


def _time_product(m: int, n: int, k: int, part: Part) -> float:
    """Return the microseconds of a product (m, k) x (k, n): whole waves of tiles, or the reads, whichever is longer."""
    rows = 64 if m <= 64 else 128
    least = float("inf")
    for columns in (64, 128, 256):
        tiles = -(-m // rows) * -(-n // columns)
        for splits in (1, 2, 4, 8):
            if splits > 1 and tiles * splits > part.processors:
                break
            waves = -(-tiles * splits // part.processors)
            rate = part.flops / part.processors * (0.75 if columns < 128 else 0.95)
            tile = 2 * rows * columns * k / splits / rate * 1e6
            least = min(least, waves * tile + 2.0 + (1.5 if splits > 1 else 0))
    return max(least, 2 * (n * k + m * (n + k)) / part.bytes_per_second / 0.85 * 1e6 + 1)
