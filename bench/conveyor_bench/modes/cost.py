"""Computes how long a step takes from its plan, with a roofline or with constants fitted to measured steps.

Used by `virtual` and `measured`. Uses no scheduler and no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from conveyor_engine.wire.step import StepPlan


class StepCounts(NamedTuple):
    """The numbers that determine a step's time."""

    tokens: int  # tokens in the linear layers
    logits: int  # tokens in the output layer
    context: int  # keys read from the cache, once for each row
    pairs: float  # query and key pairs of attention

    @classmethod
    def of(cls, plan: StepPlan) -> "StepCounts":
        """Count the plan's rows."""
        pairs = 0.0
        for computed, n in zip(plan.num_computed_tokens, plan.num_tokens, strict=True):
            pairs += n * (computed + (n + 1) / 2)
        tokens = sum(plan.num_tokens)
        return cls(tokens, sum(plan.num_logits), sum(plan.num_computed_tokens) + tokens, pairs)

    def plus(self, other: "StepCounts") -> "StepCounts":
        """Return the sum of both counts."""
        tokens, logits, context, pairs = other
        return StepCounts(self.tokens + tokens, self.logits + logits, self.context + context, self.pairs + pairs)


class Cost(Protocol):
    """A model of a step's time."""

    def seconds(self, counts: StepCounts) -> float:
        """Return the seconds of a step."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """The manufacturer's figures of a device, and the share of each that kernels reach."""

    flops: float  # dense 16-bit matrix products a second
    bytes_per_second: float
    memory_bytes: float
    flops_share: float = 0.6
    bandwidth_share: float = 0.8
    host_seconds: float = 0.0005  # the part of a step that is neither arithmetic nor reading
    memory_share: float = 0.9  # share of the memory for weights and KV cache


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder with 16-bit weights."""

    layers: int
    layer_parameters: int
    head_parameters: int
    embedding_parameters: int  # read by row, so only their memory counts
    query_size: int  # all heads together
    kv_size: int

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.layers * self.layer_parameters + self.head_parameters + self.embedding_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_size


DEVICES = {
    "A100-40G": Device(flops=312e12, bytes_per_second=1555e9, memory_bytes=40 * 2**30),
    "H200": Device(flops=989e12, bytes_per_second=4800e9, memory_bytes=141e9),
}
SHAPES = {
    "OPT-13B": Shape(
        layers=40,
        layer_parameters=12 * 5120**2,
        head_parameters=50272 * 5120,
        embedding_parameters=0,  # shared with the output layer
        query_size=5120,
        kv_size=5120,
    ),
    "Llama-3-8B": Shape(
        layers=32,
        layer_parameters=2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336,
        head_parameters=128256 * 4096,
        embedding_parameters=128256 * 4096,
        query_size=4096,
        kv_size=1024,
    ),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Each part of a step takes as long as its arithmetic or its reading, whichever is longer (Williams et al., 2009).

    Linear layers read all weights once a step; attention reads each row's keys and values once.
    """

    device: Device
    shape: Shape

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens whose keys and values fit into the memory that the weights leave."""
        room = self.device.memory_bytes * self.device.memory_share - self.shape.weight_bytes
        return int(room / self.shape.kv_bytes_per_token)

    def seconds(self, counts: StepCounts) -> float:
        linear_flops, attention_flops = self._flops(counts)
        weight_bytes = 2 * (self.shape.layers * self.shape.layer_parameters + self.shape.head_parameters)
        kv_bytes = self.shape.kv_bytes_per_token * counts.context
        return self.device.host_seconds + self._part(linear_flops, weight_bytes) + self._part(attention_flops, kv_bytes)

    def flops_utilisation(self, total: StepCounts, seconds: float) -> float:
        """Return the share of the device's arithmetic that steps with these counts used in that time."""
        return sum(self._flops(total)) / (self.device.flops * seconds)

    def _flops(self, counts: StepCounts) -> tuple[float, float]:
        """Return the floating-point operations of the linear layers, and of attention."""
        shape = self.shape
        linear = 2 * (shape.layers * shape.layer_parameters * counts.tokens + shape.head_parameters * counts.logits)
        return linear, 4 * shape.layers * shape.query_size * counts.pairs

    def _part(self, flops: float, num_bytes: float) -> float:
        device = self.device
        return max(
            flops / (device.flops * device.flops_share), num_bytes / (device.bytes_per_second * device.bandwidth_share)
        )


class Fitted:
    """Constants of a machine, fitted by least squares to steps measured there.

    The model has the same parts as the roofline. The time of linear layers is piecewise linear in their tokens, with
    knots where a CPU's kernels change. The time of attention is linear in the keys that it reads and in the pairs that
    it multiplies. No constant is negative.
    """

    _KNOTS = (1, 2, 4, 8, 16, 32, 128, 512, 1024, 2048)

    def __init__(self, steps: Sequence[tuple[StepCounts, float]]) -> None:
        """steps: counts and seconds. Squared errors are divided by a step's seconds, so that long steps weigh less."""
        seconds = np.array([each for _, each in steps])
        rows = np.array([self._features(counts) for counts, _ in steps])
        self.constants = _solve_non_negative(rows / seconds[:, None] ** 0.5, seconds**0.5)

    def seconds(self, counts: StepCounts) -> float:
        return float(np.dot(self._features(counts), self.constants))

    def _features(self, counts: StepCounts) -> list[float]:
        knots = self._KNOTS
        at = np.interp(counts.tokens, knots, range(len(knots)))
        hats = [max(0.0, 1 - abs(at - index)) for index in range(len(knots))]
        return [*hats, float(counts.context), counts.pairs]


def _solve_non_negative(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares. While a constant is negative, set the most negative one to 0 and solve again."""
    constants = np.zeros(rows.shape[1])
    free = [index for index in range(rows.shape[1]) if rows[:, index].any()]
    while free:
        scale = np.linalg.norm(rows[:, free], axis=0)
        found = np.linalg.lstsq(rows[:, free] / scale, values, rcond=None)[0] / scale
        if found.min() >= 0:
            constants[free] = found
            break
        del free[int(np.argmin(found * scale))]
    return constants
