"""The stage `kernels` measures each kernel's time, and its share of the device's maximum speed.

Attention is bound by reading keys and values in decodes, and by its products in prompts. Everything else is bound by
memory. If a figure cannot be measured (too little memory, a kernel that fails), its row has the error. Without a GPU,
Triton's interpreter runs the kernels.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from conveyor_bench.gpu.attention import Attention
from conveyor_bench.gpu.device import Ceilings, Work, measure_ceilings, seconds_of
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes
from conveyor_engine.execution.kernels import elementwise
from conveyor_engine.execution.kernels.heads import HeadNorms, prepare_heads
from conveyor_engine.execution.kernels.slot_cache import LARGEST, SlotCache
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.step import RowSampling

_SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(temperature=0.6, top_p=0.9),
    "top_k": SamplingParams(temperature=0.6, top_k=50),
}


class KernelStage:
    """One run of the stage."""

    def __init__(self, results: Results, sizes: Sizes) -> None:
        self._results, self._sizes = results, sizes
        self._device, self._dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)

    def run(self) -> None:
        ceilings = measure_ceilings(self._device, self._dtype, self._sizes.copied_bytes, self._sizes.product_width)
        self._results.row(
            "ceilings",
            copy_gb_per_second=ceilings.bytes_per_second / 1e9,
            product_tflops=ceilings.flops / 1e12,
            product=f"{self._sizes.product_width}³",
        )
        for measure in (*self._decodes(), *self._prompts(), *self._between_products(), *self._sampling()):
            measure(ceilings)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _seconds(self, calls: list[Work], *, capture: bool = True) -> float:
        return seconds_of(calls, self._device, self._sizes.seconds_each, capture=capture)

    def _report(self, table: str, what: dict[str, object], measure: Callable[[], dict[str, object]]) -> None:
        try:
            self._results.row(table, **what, **measure())
        except Exception as error:  # the other figures are still worth having
            self._results.row(table, **what, error=f"{type(error).__name__}: {str(error)[:300]}")

    def _sdpa(self, attention: Attention, ours: float) -> dict[str, object]:
        """Return the seconds of torch's attention, for comparison with `ours`."""
        try:
            theirs = self._seconds(attention.sdpa())
        except RuntimeError as error:  # too little memory, or torch has no kernel for this
            return {"sdpa_error": str(error)[:100]}
        return {"sdpa_us": theirs * 1e6, "times_faster": theirs / ours}

    def _decodes(self) -> Iterator[Callable[[Ceilings], None]]:
        for group in self._sizes.groups:
            for rows in self._sizes.decode_rows:
                for context in self._sizes.decode_contexts:
                    yield partial(self._decode, group=group, rows=rows, context=context)

        for group in self._sizes.groups:
            for rows, context in self._sizes.decodes_of_8_bits:
                for kv_dtype in LARGEST:
                    yield partial(self._decode, group=group, rows=rows, context=context, kv_dtype=kv_dtype)

    def _decode(
        self, ceilings: Ceilings, group: int, rows: int, context: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Measure decode attention.

        kv_dtype: the type of an 8-bit cache. Its bytes include the scales, and torch has no attention for it.
        """

        def measure() -> dict[str, object]:
            attention = Attention(self._sizes, group, rows, 1, context, kv_dtype)
            ours = self._seconds(attention.ours())
            least = attention.kv_bytes / ceilings.bytes_per_second
            theirs = {} if kv_dtype else self._sdpa(attention, ours)
            return {"us": ours * 1e6, "of_bandwidth": least / ours, **theirs}

        what: dict[str, object] = {"group": group, "rows": rows, "context": context}
        kind = "" if kv_dtype is None else f" over {str(kv_dtype).removeprefix('torch.')}"
        self._report(f"decode attention{kind}", what, measure)

    def _prompts(self) -> Iterator[Callable[[Ceilings], None]]:
        for group in self._sizes.groups:
            for tokens in self._sizes.prompts:
                yield partial(self._prompt, group=group, tokens=tokens)

    def _prompt(self, ceilings: Ceilings, group: int, tokens: int) -> None:
        def measure() -> dict[str, object]:
            attention = Attention(self._sizes, group, 1, tokens, tokens)
            ours = self._seconds(attention.ours())
            least = attention.flops / ceilings.flops
            return {"us": ours * 1e6, "of_flops": least / ours, **self._sdpa(attention, ours)}

        self._report("prefill attention", {"group": group, "tokens": tokens}, measure)

    def _between_products(self) -> Iterator[Callable[[Ceilings], None]]:
        for tokens in self._sizes.step_tokens:
            yield partial(self._by_memory, kernel="residual + norm", tokens=tokens, prepare=self._norm)
            yield partial(self._by_memory, kernel="SiLU x up", tokens=tokens, prepare=self._silu)
            yield partial(self._by_memory, kernel="heads and KV write", tokens=tokens, prepare=self._heads)

    def _by_memory(
        self, ceilings: Ceilings, kernel: str, tokens: int, prepare: Callable[[int], tuple[Work, int]]
    ) -> None:
        """Measure a kernel. prepare: returns a call with its own data, and the bytes that the call reads and writes."""

        def measure() -> dict[str, object]:
            call, moved = prepare(tokens)
            copies = min(64, -(-self._sizes.uncached_bytes // moved))
            seconds = self._seconds([call, *(prepare(tokens)[0] for _ in range(copies - 1))])
            return {"us": seconds * 1e6, "of_bandwidth": moved / ceilings.bytes_per_second / seconds}

        self._report("between products", {"kernel": kernel, "tokens": tokens}, measure)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _norm(self, tokens: int) -> tuple[Work, int]:
        x, residual, weight = (self._random(*shape, self._sizes.hidden) for shape in ((tokens,), (tokens,), ()))
        return lambda: elementwise.add_rms_norm(residual, x, weight, 1e-6, 0.0), 4 * x.nbytes

    def _silu(self, tokens: int) -> tuple[Work, int]:
        x = self._random(tokens, 2 * self._sizes.intermediate)
        return lambda: elementwise.silu_mul(x), x.nbytes * 3 // 2

    def _heads(self, tokens: int) -> tuple[Work, int]:
        kv_heads, dim = self._sizes.kv_heads, self._sizes.head_dim
        qkv = self._random(tokens, (self._sizes.groups[-1] + 2) * kv_heads, dim)
        rotation = (self._random(1, tokens, dim), self._random(1, tokens, dim))
        norms = HeadNorms(self._random(dim), self._random(dim), 1e-6, 0.0)
        caches = (SlotCache(self._random(tokens, kv_heads, dim)), SlotCache(self._random(tokens, kv_heads, dim)))
        slots = torch.randperm(tokens, device=self._device)
        return lambda: prepare_heads(qkv, rotation, norms, caches, slots), 2 * qkv.nbytes + 2 * rotation[0].nbytes

    def _sampling(self) -> Iterator[Callable[[Ceilings], None]]:
        for how in _SAMPLED:
            yield partial(self._sample, how=how)

    def _sample(self, ceilings: Ceilings, how: str) -> None:
        rows = self._sizes.decode_rows[-1]

        def measure() -> dict[str, object]:
            logits = self._random(rows, self._sizes.vocabulary)
            token_ids = torch.zeros((rows, 0), dtype=torch.int32, device=self._device)
            sampler = Sampler(rows, self._sizes.vocabulary, self._device, token_ids)
            for row in range(rows):
                sampler.set_row(row, RowSampling(_SAMPLED[how], row))
            numbers = np.arange(rows, dtype=np.int64)
            samples = Samples.of(numbers, numbers, self._device)
            seconds = self._seconds([lambda: sampler.sample(logits, samples)], capture=False)
            return {"us": seconds * 1e6, "of_bandwidth": logits.nbytes / ceilings.bytes_per_second / seconds}

        self._report("sampling, its launches included", {"how": how, "rows": rows}, measure)


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    KernelStage(results, sizes).run()
