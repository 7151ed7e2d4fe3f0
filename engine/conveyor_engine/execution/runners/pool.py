"""Runs plans of a model that embeds: whole prompts, packed -> one forward -> a vector each.

Built once by `build`, in place of `generate`: it too is the `loop.executor` of one device. It keeps nothing between
steps: no KV cache, no rows.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine
from conveyor_engine.execution.attention.interface import Probe
from conveyor_engine.execution.attention.packed import choose_packed
from conveyor_engine.execution.largest_step import too_large
from conveyor_engine.execution.limits import choose_max_model_len, find_context
from conveyor_engine.execution.models.kinds import TEXT_ENCODER
from conveyor_engine.execution.models.packing import find_first_position
from conveyor_engine.execution.models.probe import run_probe
from conveyor_engine.execution.models.sentence_files import read_pooling
from conveyor_engine.execution.placement import Placement, free_cached_memory
from conveyor_engine.execution.pooling import finish, pool
from conveyor_engine.execution.start import Progress, Start
from conveyor_engine.execution.transfer import HostCopy, to_device
from conveyor_engine.wire.embedding import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.step import AdmittedRow, StepPlan, StepResult

_ATTENTION = "packed"


class PoolRunner:
    """One model on one device, ready to run after construction."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress = lambda _: None) -> None:
        """Loads the model. Raises ConfigError or ModelError."""
        _check(config)
        start = Start(config, placement, progress, TEXT_ENCODER)
        self.device = start.device
        self._pooling = read_pooling(Path(config.model))
        self.model = start.load()
        probe = run_probe(self.model, Probe(runs_bidirectional=True), self.device)
        self._mode = self._pooling.mode or ("last" if probe.is_causal else "mean")
        self._first_position = find_first_position(self.model)
        self._pack = choose_packed(config.attention_backend, self.device, start.dtype)
        start.fuse(self.model, len(probe.shapes))
        self.facts = start.facts(
            self.model,
            max_model_len=choose_max_model_len(config, self._find_limit(start.model_config)),
            attention_backend=_ATTENTION,
            of_task=_describe(start.model_config).encode(),
        )
        progress(f"event=pooling_chosen mode={self._mode} normalizes={str(self._pooling.normalizes).lower()}")
        progress(f"event=largest_step_fits mib={self._find_step_bytes(start) / 2**20:.0f}")

    def _find_limit(self, model_config: PretrainedConfig) -> int | None:
        """Tokens of the longest prompt that the model was made for; None if no file says so."""
        positions = find_context(model_config)
        usable = None if positions is None else positions - self._first_position
        return min((limit for limit in (usable, self._pooling.max_seq_length) if limit is not None), default=None)

    def _find_step_bytes(self, start: Start) -> int:
        """Memory of the largest step. Raises ModelError if it does not fit."""
        facts, settings = self.facts, "`max_num_batched_tokens` or `max_model_len`"
        longest = facts.max_model_len  # it may have a step alone
        num_tokens = max(longest, min(facts.max_num_batched_tokens, facts.max_num_seqs * longest))
        lengths = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
        step_bytes = start.find_step_bytes(
            self.model, num_tokens, settings, lambda: self._pool([[0] * length for length in lengths])
        )
        if self.device.type == "cpu" and step_bytes > machine.free_memory_bytes(self.device):
            raise too_large(num_tokens, settings)
        return step_bytes

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begins a step: computes the whole prompt of each row, which the plan brings. No row samples.

        On a GPU it launches the work; what the returned function returns waits for the vectors.
        """
        brought = {row.row: row for row in plan.admitted}
        prompts = [brought[row] for row in plan.rows]
        with torch.inference_mode():
            copy = HostCopy(self._pool([prompt.token_ids for prompt in prompts]))

        def read() -> StepResult:
            pairs = zip(copy.wait()[0].numpy(), prompts, strict=True)
            return StepResult(plan.number, [], payloads=[self._finish(*pair) for pair in pairs])

        return lambda _: read

    def _finish(self, vector: npt.NDArray[np.float32], prompt: AdmittedRow) -> bytes:
        asked = PoolingParams.read(prompt.payload)
        return finish(vector, asked.dimensions, normalizes=self._pooling.normalizes)

    def _pool(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """-> float32 (prompts, hidden)."""
        lengths = [len(prompt) for prompt in prompts]
        starts = [0, *accumulate(lengths)]
        token_ids = np.fromiter(chain.from_iterable(prompts), dtype=np.int64, count=starts[-1])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths) + self._first_position
        hidden: torch.Tensor = self.model(
            input_ids=to_device(token_ids, self.device)[None],
            position_ids=to_device(positions, self.device)[None],
            use_cache=False,
            paged=self._pack(starts),
        ).last_hidden_state
        return pool(hidden[0], starts, self._mode)

    @property
    def extra_warmup_tokens(self) -> int:
        """The longest prompt: it may exceed the token budget of a step, which it then has alone."""
        return self.facts.max_model_len

    def free_memory(self) -> None:
        """Returns cached memory to the device after a failed step. Raises if the device is broken."""
        free_cached_memory(self.device)


def _check(config: EngineConfig) -> None:
    """Refuses settings that apply to generation only. Raises ConfigError."""
    if config.attention_backend not in ("auto", "torch"):
        raise ConfigError(
            f"`attention_backend: {config.attention_backend}` reads a KV cache, and a model that embeds has none; "
            "use `attention_backend: auto`"
        )
    if config.padding == "real":
        raise ConfigError(
            "`padding: real` is set, but a batch of prompts to embed is packed in every mode; leave it out"
        )


def _describe(model_config: PretrainedConfig) -> EmbeddingFacts:
    """Reads the fields of config.json that vLLM reads: `is_matryoshka`, `matryoshka_dimensions`."""
    size = int(model_config.hidden_size)
    named = getattr(model_config, "matryoshka_dimensions", None)
    named = named if isinstance(named, list | tuple) else ()
    named = tuple(sorted({d for d in named if type(d) is int and 1 <= d <= size}))
    return EmbeddingFacts(
        size=size,
        is_matryoshka=bool(named) or getattr(model_config, "is_matryoshka", False) is True,
        matryoshka_dimensions=named,
    )
