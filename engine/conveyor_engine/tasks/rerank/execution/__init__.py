"""Loads a model that ranks: a cross-encoder, or a causal model whose logits of given tokens are the score."""

from pathlib import Path
from typing import Final

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.classify import build_cross_encoder
from conveyor_engine.execution.start import Progress
from conveyor_engine.loop.executor import Executor
from conveyor_engine.model_files import scores_tokens
from conveyor_engine.tasks.rerank.execution.token_scorer import TokenScorer


def _build(config: EngineConfig, placement: Placement, progress: Progress) -> Executor:
    make = TokenScorer if scores_tokens(Path(config.model)) else build_cross_encoder
    return make(config, placement, progress)


TASK: Final[Build[Executor]] = _build
