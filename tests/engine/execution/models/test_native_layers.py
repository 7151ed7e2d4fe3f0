"""Checks that all layers of a model run in one call of the compiled kernels, if the model calls all of them alike."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.execution.models.families import logits_of, make_model
from tests.engine.references import Reference, add, run
from transformers.modeling_outputs import BaseModelOutputWithPast

from conveyor_engine.execution import native
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer, NativeLayers, join_layers

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels, with vectors"
)


def fused(family: str) -> Any:
    model = make_model(family)
    fuse_model(model)
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3"])
def test_native_layers_become_one_module(family: str) -> None:
    model = fused(family)
    expected = logits_of(model)
    join_layers(model)
    (joined,) = model.model.layers
    assert isinstance(joined, NativeLayers)
    assert [type(layer) for layer in joined.layers] == [NativeDecoderLayer] * 2
    assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("family", ["Gemma2", "Mixtral", "GPTNeoX"])
def test_other_layers_stay_as_they_are(family: str) -> None:
    model = fused(family)
    before = list(model.modules())
    join_layers(model)
    assert list(model.modules()) == before


def _by_index(self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **others: Any) -> BaseModelOutputWithPast:
    hidden = self.embed_tokens(input_ids)
    rotation = self.rotary_emb(hidden, position_ids)
    for index in range(2):
        hidden = self.layers[index](hidden, position_embeddings=rotation, **others)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def _each_its_rotation(
    self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **others: Any
) -> BaseModelOutputWithPast:
    hidden = self.embed_tokens(input_ids)
    for index, layer in enumerate(self.layers):
        rotation = self.rotary_emb(hidden, position_ids * (1 + index))
        hidden = layer(hidden, position_embeddings=rotation, **others)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def _fails(*_: Any, **__: Any) -> BaseModelOutputWithPast:
    raise ValueError("not with these numbers")


@pytest.mark.parametrize("forward", [_by_index, _each_its_rotation, _fails])
def test_layers_that_a_model_calls_apart_stay_apart(forward: Any) -> None:
    model = fused("Llama")
    model.model.forward = types.MethodType(forward, model.model)
    before = model.model.layers
    join_layers(model)
    assert model.model.layers is before


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory: Path = tmp_path_factory.mktemp("model")
    return Reference("qwen3", directory)


def test_a_step_is_one_call_and_the_last_layer_apart_only_where_not_all_tokens_are_sampled(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    forward = native.Layers.forward

    def counted(self: native.Layers, *arguments: Any) -> torch.Tensor:
        counts.append(arguments[4])
        return forward(self, *arguments)

    monkeypatch.setattr(native.Layers, "forward", counted)
    core = reference.make_core(attention_backend="native")
    num_layers = core.executor.model.config.num_hidden_layers  # type: ignore[attr-defined]
    counts.clear()  # those of the warm-up
    add(core, "a", reference.prompts[1], max_tokens=3)
    run(core)
    assert set(counts[:-2]) == {num_layers - 1}
    assert counts[-2:] == [num_layers] * 2


def test_two_engines_over_one_model_keep_their_caches_apart(reference: Reference) -> None:
    """The layers are joined once for both engines, and use the caches of the backend that calls them."""
    cores = [reference.make_core(attention_backend="native") for _ in range(2)]
    cores[1].executor.model = cores[0].executor.model  # type: ignore[attr-defined]
    calls: list[list[int]] = [[], []]
    for core, prompt in zip(cores, reference.prompts, strict=False):
        add(core, "a", prompt, max_tokens=len(reference.answers[0]))
    while any(core.has_unfinished() for core in cores):
        for core, tokens in zip(cores, calls, strict=True):
            tokens += [token for output in core.step(0.0) for token in output.new_token_ids]
    assert calls == reference.answers[:2]
