"""Checks that a model whose states are not carried as in transformers is refused, and limits of models with states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.references import Reference, answers
from tests.engine.tiny_models import KINDS, OTHER_KINDS, WITH_STATES, save_tiny_model

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution import start as start_module
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.probe import probe_layers
from conveyor_engine.execution.models.state_trial import check_states
from conveyor_engine.execution.states import StepStates

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["update_conv_state", "update_recurrent_state"])
def test_a_state_that_is_not_carried_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    save_tiny_model("qwen3_5_text", tmp_path)
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, CPU)
    layers, shapes = probe_layers(model, CPU)
    check_states(model, layers, shapes)

    def forget(self: StepStates, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states

    monkeypatch.setattr(StepStates, method, forget)
    with pytest.raises(ModelError, match="when a text is computed in parts"):
        check_states(model, layers, shapes)


def test_the_shapes_of_states_are_found(tmp_path: Path) -> None:
    save_tiny_model("qwen3_5_text", tmp_path)
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.bfloat16, CPU)
    layers, shapes = probe_layers(model, CPU)
    assert [layer.num_heads for layer in layers] == [0, 0, 4]
    found = {(key.layer, key.kind): (state.shape, state.dtype) for key, state in shapes.items()}
    conv, recurrent = ((128, 4), torch.bfloat16), ((4, 16, 16), torch.float32)
    assert found == {(layer, kind): s for layer in (0, 1) for kind, s in (("conv", conv), ("recurrent", recurrent))}


def test_rows_follow_from_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = Reference("qwen3_5_text", tmp_path)
    settings: dict[str, Any] = {}

    def limit(_: object, **of: Any) -> int:
        settings.update(of)
        return 2

    monkeypatch.setattr(start_module, "limit_rows", limit)
    core = ref.make_core(max_num_seqs=None)
    assert (settings["max_num_seqs"], settings["row_bytes"]) == (13, 2 * (128 * 4 + 4 * 16 * 16) * 4)
    assert core.facts.max_num_seqs == 2
    assert core.facts.has_states
    assert answers(core, ref.prompts) == ref.answers


def test_dummy_tokens_are_refused(tmp_path: Path) -> None:
    ref = Reference("qwen3_5_text", tmp_path)
    with pytest.raises(ConfigError, match="`padding: real` computes dummy tokens"):
        ref.make_core(batching_mode="static", padding="real")


@pytest.mark.parametrize("kind", sorted(WITH_STATES & {*KINDS, *OTHER_KINDS}))
def test_parts_of_several_tokens_give_the_numbers_of_one_piece(tmp_path: Path, kind: str) -> None:
    save_tiny_model(kind, tmp_path)
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, CPU)
    check_states(model, *probe_layers(model, CPU))
