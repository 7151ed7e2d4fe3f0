"""Compares the table of tested families with the tiny models that the tests have, and with what the engine replaces."""

import pytest
import torch
from tests.engine import classifiers, encoders
from tests.engine.tasks.embed import test_outputs
from tests.engine.tiny_models import KINDS, OTHER_KINDS, REJECTED, make_config, make_model

from conveyor_engine.execution import native
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.latent import keep_latents
from conveyor_engine.execution.models.mixers import carry_states
from conveyor_engine.execution.models.towers import take_towers
from conveyor_engine.tasks.imagegenerate.layouts import LAYOUTS
from conveyor_protocol.families import FAMILIES, PIPELINES, VECTORS, Replaced, Task


def kinds_of(task: Task) -> set[str]:
    return {model_type for model_type, family in FAMILIES.items() if task in family.tasks}


def test_each_row_has_a_tiny_model_and_each_tiny_model_a_row() -> None:
    assert kinds_of("Generate") == {*KINDS, *OTHER_KINDS, *REJECTED}
    assert kinds_of("Embed") == set(encoders.KINDS)
    assert kinds_of("Classify") == set(classifiers.KINDS)
    assert kinds_of("Rerank") == {*classifiers.KINDS, "gemma2"}, "gemma2 is in tests/engine/tasks/rerank"


def test_each_kind_of_vectors_is_compared_with_its_definition() -> None:
    assert {name: set(kind.families) for name, kind in VECTORS.items()} == test_outputs.FAMILIES_OF


def test_each_pipeline_of_the_table_is_a_layout_of_the_task() -> None:
    assert PIPELINES.keys() == LAYOUTS.keys()


@pytest.mark.skipif(native.why_missing() is not None, reason="the compiled kernels replace layers on CPUs")
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)])
def test_the_table_says_what_the_engine_replaces(kind: str) -> None:
    torch.manual_seed(0)
    interface.register()
    model = make_model(kind, make_config(kind), interface.IMPLEMENTATION)
    take_towers(model)
    carry_states(model)
    done = {"latents": keep_latents(model.requires_grad_(False))} | fuse_model(model)
    largest: dict[str, Replaced] = {
        "latents": "latents",
        "layers": "layers",
        "mixers": "mixers",
        "attentions": "attention",
    }
    found = next((name for part, name in largest.items() if done.get(part)), "parts")
    assert found == FAMILIES[kind].replaced, done
