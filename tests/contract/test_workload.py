"""Tests that the engine uses the values in `status.effective.derived`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.builders import build_body
from tests.contract.test_spec_reaches_engine import read_as_engine
from tests.engine.chat_model import CONTEXT_TOKENS, write_chat_model

from conveyor_api.resource import InferenceService
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_operator.inferenceservice.derived import describe_derived
from e2e.cluster.paths import REPOSITORY

WORKLOAD = {"inputTokens": {"p50": 20, "p95": 60}, "outputTokens": {"p50": 10, "p95": 30}}


@pytest.mark.parametrize(
    "spec",
    [{}, {"batching": {"maxBatchSize": 4}}, {"kvCache": {"blockBudget": 8}}, {"engine": {"maxModelLen": 100}}],
    ids=str,
)
def test_an_engine_has_the_context_and_the_blocks_that_the_status_reports(spec: dict[str, Any], tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    body = build_body(**{"task": "Generate", "workload": WORKLOAD, **spec})
    config = read_as_engine(body, tmp_path)
    config = replace(config, model=str(model), device="cpu", dtype="float32", warmup=False)
    facts = GenerateRunner(config, open_placement(config)).facts
    measured = {
        each.name: each.value for each in describe_derived(InferenceService.parse(body).settled_spec, CONTEXT_TOKENS)
    }
    if "engine" not in spec:
        assert measured.pop("engine.maxModelLen") == f"{facts.max_model_len} tokens"
    if "kvCache" not in spec:
        assert measured.pop("kvCache.blockBudget") == f"{facts.num_kv_blocks} blocks"
    assert measured.keys() == {"CUDA graphs of decodes", "warm-up"}, "a field that sets a size has no row"


def test_the_documented_workload_arrives(tmp_path: Path) -> None:
    block = (REPOSITORY / "docs/workload.md").read_text().split("```yaml\n")[1].split("```")[0]
    config = read_as_engine(build_body(**yaml.safe_load(block)["spec"]), tmp_path)
    assert config.workload is not None
    assert (config.workload.long_tokens, config.max_model_len, config.num_kv_blocks) == (1536, None, None)
