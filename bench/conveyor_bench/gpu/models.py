"""Makes engines with models of random weights. The weights are made on the device, without a hub or files.

`python -m conveyor_bench.gpu.models --fd N` is the process of such an engine, for the stage `http`.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conveyor_bench.comparing.shapes import model_config
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.graphs.cuda import run_again
from conveyor_engine.execution.models.mixers import carry_states
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner


def make_model(
    _: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = interface.IMPLEMENTATION,
) -> PreTrainedModel:
    """Make the configuration's model with random weights (seed 0). Replaces `load_model`."""
    interface.register()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    carry_states(model)
    return model.eval().requires_grad_(False)


def write_config(folder: Path, shape: str) -> Path:
    """Write a model directory without weights, for an engine whose model `make_model` makes."""
    model_config(shape).save_pretrained(folder)
    return folder


def open_core(config: EngineConfig, report: Callable[[str], None]) -> EngineCore:
    """Open a core as the engine process does.

    On a GPU, steps overlap and graphs replay decodes. A rehearsal on the CPU imitates the graphs, but its steps do not
    overlap.
    """
    rehearsed = run_again if config.device == "cpu" and not config.enforce_eager else None
    runner = GenerateRunner(config, open_placement(config), report, make_model, capture=rehearsed)
    return EngineCore(config, runner, report, overlap=runner.facts.device != "cpu")


def timed_core(config: EngineConfig) -> tuple[EngineCore, float, list[str]]:
    """Open a core. Returns it, the seconds until it was ready, and the lines that it reported."""
    lines: list[str] = []
    started = time.monotonic()
    core = open_core(config, lines.append)
    gc.freeze()  # as the engine process does, because collecting all loaded objects would delay a step
    return core, time.monotonic() - started, lines


if __name__ == "__main__":
    from conveyor_engine.loop.process import Channel, main
    from conveyor_engine.wire.messages import LoadingLine

    def load(config: EngineConfig, channel: Channel) -> EngineCore:
        """Load a model with random weights instead of the directory's."""
        return open_core(config, lambda line: channel.send(LoadingLine(line)))

    code = main(load)
    sys.stderr.flush()
    os._exit(code)
