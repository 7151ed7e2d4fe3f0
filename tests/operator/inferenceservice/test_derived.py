"""Tests the sizes in the status that are derived from the workload."""

from typing import Any

import yaml
from tests.operator.builders import make_resource

from conveyor_operator.inferenceservice.derived import describe_derived
from e2e.cluster.paths import REPOSITORY

CHAT = {"inputTokens": {"p50": 256, "p95": 1024}, "outputTokens": {"p50": 128, "p95": 512}}


def derive(context_length: int | None = 32_768, **spec: Any) -> dict[str, str]:
    text = describe_derived(make_resource(**({"workload": CHAT} | spec)).settled_spec, context_length)
    assert all(each.reason for each in text)
    return {each.name: each.value for each in text}


def test_nothing_follows_from_nothing() -> None:
    assert describe_derived(make_resource().settled_spec, 1024) == []


def test_each_derived_size_is_reported() -> None:
    assert derive(autoscaling={"maxReplicas": 2}) == {
        "engine.maxModelLen": "16384 tokens",
        "kvCache.blockBudget": "24576 blocks",
        "CUDA graphs of decodes": "up to 256 rows",
        "warm-up": "prompts of 256 and 1024 tokens",
        "requests in flight per replica": "192",
    }


def test_fields_that_set_a_size_win() -> None:
    derived = derive(engine={"maxModelLen": 4096}, kvCache={"blockBudget": 256})
    assert derived == {"CUDA graphs of decodes": "up to 10 rows", "warm-up": "prompts of 256 and 1024 tokens"}


def test_a_short_cache_lowers_the_target_and_the_context() -> None:
    derived = derive(kvCache={"blockBudget": 240}, autoscaling={"maxReplicas": 2})
    assert derived["engine.maxModelLen"] == "3840 tokens"
    held = 3840 // 548  # tokens of a request, on average
    assert derived["requests in flight per replica"] == f"{round(192 * held / 256, 1):g}"


def test_the_model_s_context_is_the_limit_once_it_is_known() -> None:
    assert derive(None)["engine.maxModelLen"] == "16384 tokens"
    assert derive(4096)["engine.maxModelLen"] == "4096 tokens"


def test_without_answers_only_context_and_warm_up_follow() -> None:
    derived = derive(task="Embed", workload={"inputTokens": CHAT["inputTokens"]}, autoscaling={"maxReplicas": 2})
    assert derived.keys() == {"engine.maxModelLen", "warm-up"}


def test_the_page_shows_what_the_status_has() -> None:
    spec, derived = (
        block.split("```")[0] for block in (REPOSITORY / "docs/workload.md").read_text().split("```yaml\n")[1:]
    )
    service = make_resource(**yaml.safe_load(spec)["spec"], autoscaling={"maxReplicas": 2})
    assert yaml.safe_load(derived) == [each.to_manifest() for each in describe_derived(service.settled_spec, 32_768)]
