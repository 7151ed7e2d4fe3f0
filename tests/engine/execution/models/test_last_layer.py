"""Checks that the last layer computes only the sampled tokens, if the model's operations after it allow that."""

from typing import Any

import pytest
import torch
from tests.engine.execution.models.families import make_model
from tests.engine.references import Reference, add, answers, run
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution.batch import only_sampled
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.last_layer import find_last_layer
from conveyor_engine.execution.models.probe import probe_layers
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution import runner
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

CPU = torch.device("cpu")
SAMPLES_BY_STEP = [0, 0, 0, 1]  # for a prompt of 50 tokens in chunks of at most 13


def find(model: PreTrainedModel) -> int | None:
    layers, _ = probe_layers(model, CPU)
    fuse_model(model)
    return find_last_layer(model, layers)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_our_own_layers_has_such_a_layer(family: str, dtype: torch.dtype) -> None:
    assert find(make_model(family).to(dtype)) == 1


@pytest.mark.parametrize("family", ["Mixtral", "GPTNeoX"])
def test_a_model_of_others_has_none(family: str) -> None:
    assert find(make_model(family)) is None


class _Mean(nn.Module):
    """Mixes tokens."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + hidden_states.mean(dim=1, keepdim=True)


class _Places(nn.Module):
    """Adds something that depends on a token's index."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + torch.arange(hidden_states.shape[1])[:, None]


@pytest.mark.parametrize("after", [_Mean(), _Places()])
def test_what_comes_after_it_must_take_each_token_by_itself(after: nn.Module) -> None:
    model: Any = make_model("Llama")
    model.model.norm = nn.Sequential(model.model.norm, after)
    assert find(model) is None


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference("qwen3", tmp_path_factory.mktemp("model"))


def _rows_after_the_last_layer(core: EngineCore) -> list[int]:
    """Return a list to which each step adds the number of tokens that the last norm gets."""
    rows: list[int] = []
    assert isinstance(core.executor, GenerateRunner)
    model: Any = core.executor.model
    model.model.norm.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    return rows


def test_nothing_else_is_computed_after_its_attention(reference: Reference) -> None:
    core = reference.make_core(attention_backend="native")
    rows = _rows_after_the_last_layer(core)
    add(core, "a", reference.prompts[2], max_tokens=3)
    run(core)
    assert rows == [*SAMPLES_BY_STEP, 1, 1]


def test_another_token_than_the_sampled_is_found_out(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        last = only_sampled(*arguments)
        if last is not None:
            last.tokens = (last.tokens - 1).clamp_min(0)
        return last

    assert answers(reference.make_core(attention_backend="native"), reference.prompts) == reference.answers
    monkeypatch.setattr(runner, "only_sampled", wrong)
    assert answers(reference.make_core(attention_backend="native"), reference.prompts) != reference.answers


def test_transformers_own_modules_compute_all(reference: Reference) -> None:
    core = reference.make_core(attention_backend="torch")
    rows = _rows_after_the_last_layer(core)
    add(core, "a", reference.prompts[1], max_tokens=1)
    run(core)
    assert rows == [13, 4]
