"""Settles the settings that depend on the model's task, and refuses those that the task does not have.

Called by `__main__` when the task is known. The operator refuses the same if the spec names the task: both read
`conveyor_protocol.tasks`.
"""

from collections.abc import Iterator
from dataclasses import replace

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.registry import About, load_about


def settle(config: EngineConfig, task: str) -> EngineConfig:
    """Return the configuration with `task`, and with the task's batching mode in place of `auto`.

    Raises ConfigError if a setting does not apply to the task.
    """
    about = load_about(task)
    for problem in (*_find_problems(config, about), *_find_problems_of_lengths(config, about)):
        raise ConfigError(problem)
    if config.batching_mode != "auto":
        return replace(config, task=task)
    return replace(config, task=task, batching_mode="dynamic" if about.allows.one_step else "continuous")


def _find_problems(config: EngineConfig, about: About) -> Iterator[str]:
    """Yield a sentence for each setting that does not apply to the task."""
    allows, this = about.allows, f"this model {about.does}"
    modes = [mode.lower() for mode in allows.modes]
    if config.batching_mode not in ("auto", *modes):
        others = ", ".join(f"`batching_mode: {mode}`" for mode in modes)
        yield (
            f"`batching_mode: {config.batching_mode}` is set, but {this} in one step, and no request "
            f"can join a running step; set {others}"
        )
    latency, tokens = (
        config.objective_latency_seconds,
        (config.objective_time_to_first_token_seconds or config.objective_inter_token_latency_seconds),
    )
    if not allows.objectives and (latency or tokens):
        yield f"{this}, for which there are no objectives; leave them out"
    if allows.one_step and tokens:
        yield f"{this}: set `objective_latency_seconds` in place of objectives for tokens"
    if latency and not allows.one_step:
        yield (
            f"`objective_latency_seconds` is for models that take one step, but {this}: "
            "set `objective_time_to_first_token_seconds` or `objective_inter_token_latency_seconds`"
        )
    if (config.adapters or config.adapters_file) and not allows.adapters:
        name = "adapters" if config.adapters else "adapters_file"
        yield f"{this}: remove `{name}`, because only models that generate text have adapters"
    if config.quantization is not None and not allows.rounds:
        yield f"{this}: remove `quantization`, which is for models that generate text"
    if config.speculation is not None and not allows.speculation:
        yield f"{this}: remove `speculation`, which is for models that generate text"
    if config.padding == "real" and not allows.padding:
        yield f"`padding: real` is set, but {this}, and its batches are not padded so; leave it out"
    if config.attention_backend != "auto" and not allows.attention:
        yield f"`attention_backend: {config.attention_backend}` is set, but {this} with its own attention; leave it out"


def _find_problems_of_lengths(config: EngineConfig, about: About) -> Iterator[str]:
    """Yield a sentence for each length that does not apply to the task."""
    allows, this = about.allows, f"this model {about.does}"
    if config.max_model_len is not None and not allows.max_model_len:
        yield f"`max_model_len` is set, but {this}, and no request is longer than others; leave it out"
    if config.workload is None:
        return
    if not allows.workload:
        yield f"{this}: remove `workload_input_tokens`, which is about texts"
    elif (config.workload_output_tokens is None) != allows.one_step:
        yield f"{this}: {'remove `workload_output_tokens`' if allows.one_step else 'set `workload_output_tokens` too'}"
