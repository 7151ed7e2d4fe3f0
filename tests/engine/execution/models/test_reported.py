"""Serves checkpoints like those of reports to vLLM, llm-compressor and auto-round, or rejects them in a sentence."""

from pathlib import Path

import pytest
from tests.engine.execution.models.reported_checkpoints import REFUSED, SERVED
from tests.engine.execution.models.test_deferred import rename
from tests.engine.execution.models.test_quantized import declare, load, load_weights
from tests.engine.references import MAX_TOKENS, Reference, answers
from tests.engine.tiny_models import greedy

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.kinds import CAUSAL_LM

PROMPT = [5, 17, 3, 99, 42, 8]
WORST = 0.2  # the error of weights of 4 bits, as a part of their norm. Without scales it is far above 1
ALWAYS = ("10590", "46311", "47434", "51248", "54126")  # each reads something that no other test has


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if any(map(name.count, ALWAYS)) else pytest.mark.slow) for name in SERVED]
)
def test_it_is_served_with_its_numbers(tmp_path: Path, name: str) -> None:
    report = SERVED[name]
    model, original = report.write(tmp_path)
    declare(tmp_path, report.settings)
    weights = load_weights(tmp_path, CAUSAL_LM)
    errors = {key: float((weights[key] - each).norm() / each.norm().clamp(min=1e-9)) for key, each in original.items()}
    assert weights.keys() == original.keys()
    assert 0 < max(errors.values()) < WORST, errors
    reference = Reference.__new__(Reference)
    reference.directory = tmp_path
    model.load_state_dict(rename(weights, model), strict=False)
    expected = greedy(model, PROMPT, MAX_TOKENS)
    assert answers(reference.make_core(attention_backend="torch"), [PROMPT]) == [expected]
    (found,) = answers(reference.make_core(attention_backend="auto"), [PROMPT])
    assert len(found) == MAX_TOKENS, "with the kernels of this machine, which may round inputs"


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    report, sentence = REFUSED[name]
    report.write(tmp_path)
    if report.settings:
        declare(tmp_path, report.settings)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert sentence in str(caught.value)
