"""Tests advice by the decision flow of docs/batching.md, for traffic written by hand."""

import math
from typing import Any

import pytest
from tests.api.builders import build_body

from conveyor_api.resource import InferenceService
from conveyor_insight.advising import Advice, advise
from conveyor_insight.traffic import Histogram, Traffic


def make_service(task: str | None = "Generate", **spec: Any) -> InferenceService:
    return InferenceService.parse(build_body(**({"task": task} if task else {}), **spec))


def make_histogram(value: float, number: int) -> Histogram:
    """Return a histogram of equal values, with buckets that end just below them and at them."""
    histogram = Histogram(total=value * number)
    histogram.counts.update({value * 0.999: 0, value: number, math.inf: number})
    return histogram


def make_traffic(number: int = 1000, preemptions: int = 0, kv_tokens: int | None = 65_536, **values: float) -> Traffic:
    usual = {"prompt_tokens": 400, "output_tokens": 100, "ttft": 0.2, "itl": 0.02, "latency": 2.0, "queue": 0.01}
    traffic = Traffic(1, preemptions=preemptions, kv_tokens=kv_tokens)
    for name, value in {**usual, "batch_size": 4, **values}.items():
        traffic.histograms[name] = make_histogram(value, number)
    return traffic


def advice(service: InferenceService, traffic: Traffic) -> tuple[Advice, str]:
    found = advise(service, traffic)
    return found, " ".join(found.sentences)


@pytest.mark.parametrize("task", ["Embed", "Rerank", "Classify", "ImageClassify"])
def test_tasks_of_one_step_get_dynamic(task: str) -> None:
    found, text = advice(make_service(task, batching={"mode": "Static"}), make_traffic())
    assert found.mode == "Dynamic"
    assert found.fields["mode"] == "Dynamic"
    assert f"task {task} takes one step" in text
    assert not advise(make_service(task), make_traffic()).fields, "it is the default"


def test_text_gets_continuous_and_a_sentence_about_its_lengths() -> None:
    found, text = advice(make_service(batching={"mode": "Static"}), make_traffic())
    assert found.fields == {"mode": "Continuous"}
    assert "they are alike or short, so Static would lose little offline" in text
    varied = make_traffic()
    varied["output_tokens"].counts.update({50.0: 900, 100.0: 1000})
    assert "the more they differ" in advice(make_service(), varied)[1]
    assert "must never share a step" in advice(make_service(batching={"mode": "None"}), make_traffic())[1]


@pytest.mark.parametrize(("task", "steps"), [("Transcribe", "tokens"), ("ImageGenerate", "denoising steps")])
def test_tasks_without_texts_that_step_get_continuous(task: str, steps: str) -> None:
    found, text = advice(make_service(task, batching={"mode": "Static"}), make_traffic())
    assert found.mode == "Continuous"
    assert f"leave between two {steps} of the others" in text
    assert found.tune_flags == advise(make_service("Embed"), make_traffic()).tune_flags


def test_an_unknown_task_and_vllm_get_the_facts_that_are_known() -> None:
    found, text = advice(make_service(None), make_traffic(0))
    assert found.fields == {}
    assert "not known until an engine has read its files" in text
    vllm = make_service(None, runtime="VLLM", engine={"image": "vllm/vllm-openai:v0.11.0"})
    assert "vLLM has no other mode" in advice(vllm, make_traffic())[1]


def test_few_requests_are_no_ground_for_another_size() -> None:
    found, text = advice(make_service(), make_traffic(99, preemptions=99))
    assert (found.fields, found.tune_flags) == ({}, ())
    assert "have seen 99 requests" in text


def test_full_batches_with_a_queue_get_twice_the_size_as_far_as_the_cache_goes() -> None:
    full, service = {"batch_size": 32.0, "queue": 1.0}, make_service(batching={"maxBatchSize": 32})
    found, text = advice(service, make_traffic(**full))
    assert found.fields == {"maxBatchSize": 64}
    assert "requests wait 1 s" in text
    assert advise(service, make_traffic(kv_tokens=25_000, **full)).fields == {"maxBatchSize": 50}
    assert "holds no more" in advice(service, make_traffic(kv_tokens=10_000, **full))[1]
    assert "do not report the size of their KV cache" in advice(service, make_traffic(kv_tokens=None, **full))[1]
    assert "hardly wait" in advice(service, make_traffic(batch_size=32.0))[1]
    assert "the limit has no effect" in advice(service, make_traffic(batch_size=20.0, queue=1.0))[1]


@pytest.mark.parametrize("task", ["Embed", "Rerank", "Classify", "ImageClassify", "Transcribe", "ImageGenerate"])
def test_no_cache_limits_tasks_that_generate_no_text(task: str) -> None:
    full = {"batch_size": 32.0, "queue": 1.0}
    found, text = advice(make_service(task, batching={"maxBatchSize": 32}), make_traffic(kv_tokens=None, **full))
    assert found.fields == {"maxBatchSize": 64}
    assert "makes each request slower" in text
    full = {"batch_size": 1024.0, "queue": 1.0}
    found, text = advice(make_service(task, batching={"maxBatchSize": 1024}), make_traffic(kv_tokens=None, **full))
    assert not found.fields
    assert "1024 is the most that is ever advised" in text


def test_preempted_requests_get_a_batch_that_the_cache_holds() -> None:
    found, text = advice(make_service(), make_traffic(preemptions=300, kv_tokens=8000))
    assert found.fields == {"maxBatchSize": 16}
    assert "30% of requests were preempted" in text
    assert "More blocks would help too" in text
    assert not advise(make_service(), make_traffic(preemptions=5, kv_tokens=8000)).fields, "one in 200 is no reason"


def test_the_advice_names_whether_a_window_has_an_effect() -> None:
    service = make_service("Embed")
    assert "no batch has closed yet" in advice(service, make_traffic())[1]
    traffic = make_traffic()
    traffic.closes.update(full=9, window=1)
    assert "90% of batches close because they are full" in advice(service, traffic)[1]
    traffic.closes.update(window=90)
    assert "91% of batches close before they are full" in advice(service, traffic)[1]
    assert "window" not in advice(make_service(), traffic)[1]


def test_the_share_of_accepted_drafts_is_named_if_there_were_drafts() -> None:
    traffic = make_traffic()
    assert "speculation" not in advice(make_service(), traffic)[1]
    traffic.tokens, traffic.drafts, traffic.accepted_drafts = 1000, 500, 400
    sentence = "speculation: 80% of the computed drafts were accepted; 40% of all tokens were drafts."
    assert sentence in advice(make_service(), traffic)[1]


def test_a_tune_of_this_traffic_is_named() -> None:
    flags = " ".join(advise(make_service(), make_traffic()).tune_flags)
    assert flags == "--input-tokens 400,400 --output-tokens 100,100 --objective ttft=200ms,itl=20ms"
    flags = " ".join(advise(make_service("Embed"), make_traffic()).tune_flags)
    assert flags == "--input-tokens 400,400 --objective latency=2000ms"


LENGTHS = {"inputTokens": {"p50": 400, "p95": 400}, "outputTokens": {"p50": 100, "p95": 100}}


def test_observed_lengths_stand_beside_the_declared_ones_and_are_suggested_where_they_differ() -> None:
    found, text = advice(make_service(), make_traffic())
    assert found.workload == LENGTHS
    assert "workload.inputTokens: observed 400 tokens at P50 and 400 at P95, declared nothing." in text
    assert "a change restarts them" in text
    found, text = advice(make_service(workload=LENGTHS), make_traffic(prompt_tokens=500))
    assert found.workload is None, "a factor of 1.25 is noise"
    assert "observed 500 tokens at P50 and 500 at P95, declared 400 tokens at P50 and 400 at P95" in text
    found, _ = advice(make_service(workload=LENGTHS), make_traffic(output_tokens=300))
    assert found.workload == {**LENGTHS, "outputTokens": {"p50": 300, "p95": 300}}


def test_lengths_are_not_suggested_of_few_requests_nor_to_vllm() -> None:
    assert advise(make_service(), make_traffic(99)).workload is None
    vllm = make_service(None, runtime="VLLM", engine={"image": "vllm/vllm-openai:v0.11.0"})
    assert advise(vllm, make_traffic()).workload is None


def test_images_have_no_lengths() -> None:
    assert advise(make_service("ImageClassify"), make_traffic()).workload is None


def test_a_task_of_one_step_has_lengths_of_prompts_alone() -> None:
    assert advise(make_service("Embed"), make_traffic()).workload == {"inputTokens": LENGTHS["inputTokens"]}
