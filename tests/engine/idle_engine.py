"""Runs `serve` with an engine that computes nothing, for tests of the API process, the loop and the scheduler.

Those and the socket between them are the real ones. The executor gives rows that are greedy A's and the others B's, in
a millisecond a step, and with `--task embed` zeros. It imports no torch: such a server is ready in a quarter of the
processor time of a real one.
`python -m tests.engine.idle_engine serve ...` is the server, and with `--fd N` the engine process that it starts.
"""

import os
import sys
import time
from functools import partial

from tests.engine.builders import make_facts
from tests.engine.chat_model import CONTEXT_TOKENS, VOCABULARY

from conveyor_engine import __main__ as program
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop import process
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Sample
from conveyor_engine.serving import server
from conveyor_engine.tasks.embed.facts import EmbeddingFacts
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan, StepResult

STEP_SECONDS = 0.001
VECTOR_SIZE = 48


class IdleExecutor:
    """An executor that only keeps whether each row is greedy."""

    extra_warmup_tokens = ()
    graph_sizes = ()

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self._tokens: dict[int, int] = {}

    def begin(self, plan: StepPlan) -> Sample:
        time.sleep(STEP_SECONDS)
        if self.facts.task == "embed":
            vector = bytes(4 * VECTOR_SIZE)
            return lambda _: lambda: StepResult(plan.number, [], payloads=[vector for _ in plan.rows])
        for admitted in plan.admitted:
            assert admitted.sampling is not None
            params = admitted.sampling.params
            self._tokens[admitted.row] = ord("A" if params.temperature == 0 or params.top_k == 1 else "B")
        sampled = [self._tokens[row] for row, logits in zip(plan.rows, plan.num_logits, strict=True) if logits]
        return lambda _: lambda: StepResult(plan.number, [[token] for token in sampled])

    def free_memory(self) -> None:
        pass


def load(config: EngineConfig, _: process.Channel) -> EngineCore:
    embeds = config.task == "embed"
    facts = make_facts(
        task="embed" if embeds else "generate",
        max_model_len=CONTEXT_TOKENS,
        vocab_size=VOCABULARY,
        eos_token_ids=(),
        num_kv_blocks=0 if embeds else config.num_kv_blocks,
        block_size=16,
        max_num_seqs=config.choose_num_seqs(),
        max_num_batched_tokens=8192,
        of_task=EmbeddingFacts(size=VECTOR_SIZE).encode() if embeds else b"",
    )
    return EngineCore(config, IdleExecutor(facts))


if __name__ == "__main__":
    if "--fd" in sys.argv:
        os._exit(process.main(load))
    server.serve = partial(server.serve, engine_program="tests.engine.idle_engine")
    sys.exit(program.main(sys.argv[1:]))
