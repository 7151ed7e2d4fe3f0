"""An executor whose forward does nothing, and an engine process with this executor. Used by `host` and `served`.

The executor does the host's part of a step of `tasks.generate` (the rows' state, the packed batch, the
result), and returns the same token for every row instead of computing one. `python -m conveyor_bench.engine.idle --fd
N` runs the process.
"""

import os
import sys
from collections.abc import Sequence

import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.batch import build_batch
from conveyor_engine.execution.rows import Rows
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Sample
from conveyor_engine.loop.process import Channel, main
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan, StepResult

TOKEN = 65
VOCABULARY = 256


class IdleExecutor:
    """An executor on the CPU with rows and batches, but without a model or KV cache."""

    extra_warmup_tokens = ()
    graph_sizes: Sequence[int] = ()

    def __init__(self, config: EngineConfig) -> None:
        assert config.max_model_len is not None
        blocks_per_row = -(-config.max_model_len // config.block_size)
        self.facts = ModelFacts(
            task="generate",
            max_model_len=config.max_model_len,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            dtype="none",
            device="cpu",
            attention_backend="none",
            num_kv_blocks=config.choose_num_seqs() * blocks_per_row,
            block_size=config.block_size,
            max_num_seqs=config.choose_num_seqs(),
            max_num_batched_tokens=config.max_num_batched_tokens or 8192,
        )
        self._rows = Rows(config.choose_num_seqs(), config.max_model_len, config.block_size, torch.device("cpu"))

    def begin(self, plan: StepPlan) -> Sample:
        with torch.inference_mode():
            self._rows.update(plan)
            samples = build_batch(plan, self._rows, self.facts.block_size).samples
            token_ids = torch.full_like(samples.device_rows, TOKEN)
            self._rows.append(samples.device_rows, samples.device_positions, token_ids)
        return lambda _: lambda: StepResult(plan.number, token_ids[:, None].tolist())

    def free_memory(self) -> None:
        pass


def load(config: EngineConfig, _: Channel) -> EngineCore:
    """Build a core with this executor instead of loading a model."""
    torch.set_num_threads(1)  # what a GPU would do is little work here, and threads would wait for each other
    return EngineCore(config, IdleExecutor(config))


if __name__ == "__main__":
    code = main(load)
    sys.stderr.flush()
    os._exit(code)
