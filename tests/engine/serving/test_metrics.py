"""Tests the engine's own metrics of steps and batches."""

import re

from conveyor_engine.serving.adapter_metrics import AdapterUse
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.wire.messages import StepOutputs
from conveyor_engine.wire.request import EngineStats, FinishReason, RequestOutput


def test_a_step_that_only_reports_an_abort_is_no_sample_of_the_batch() -> None:
    metrics = EngineMetrics("m")
    stats = EngineStats(num_steps=1, step_num_seqs=3, prompt_tokens=37, generation_tokens=3, num_running=3)
    metrics.observe_step(StepOutputs([], stats, 3))
    gone = RequestOutput(request_id="a", finish_reason=FinishReason.ABORT)
    metrics.observe_step(StepOutputs([gone], EngineStats(num_steps=1, prompt_tokens=37, generation_tokens=3), 3))
    text = metrics.render().decode()
    assert 'conveyor_engine_batch_size_count{model_name="m"} 1.0' in text
    assert 'vllm:iteration_tokens_total_sum{model_name="m"} 40.0' in text
    assert 'vllm:num_requests_running{model_name="m"} 0.0' in text, "the gauges are the newest"


def test_each_batch_that_closes_is_a_sample_of_its_cost_its_padding_and_its_wait() -> None:
    metrics = EngineMetrics("m", "pixels")
    stats = EngineStats(num_batches=1, batch_cost=300, batch_padding_share=0.25, batch_wait_seconds=0.012)
    metrics.observe_step(StepOutputs([], stats, 0))
    metrics.observe_step(StepOutputs([], stats, 0))
    text = metrics.render().decode()
    assert 'conveyor_engine_batch_cost_sum{model_name="m",unit="pixels"} 300.0' in text
    assert 'conveyor_engine_batch_padding_ratio_sum{model_name="m"} 0.25' in text
    assert 'conveyor_engine_batch_wait_seconds_sum{model_name="m"} 0.012' in text
    for name in ("cost", "padding_ratio", "wait_seconds"):
        (count,) = re.findall(rf"conveyor_engine_batch_{name}_count.* (\S+)", text)
        assert float(count) == 1, "and no step counts it again"


def test_adapters_of_open_requests_are_listed_and_those_of_ended_ones_counted() -> None:
    served = dict.fromkeys(("sql", "fr", "de"))
    metrics = EngineMetrics("m", adapters=served)

    def info() -> str:
        (found,) = re.findall(r'lora_requests_info{max_lora="3",model_name="m",(.*)} ', metrics.render().decode())
        return str(found)

    first, second = AdapterUse(metrics.adapters, "sql"), AdapterUse(metrics.adapters, "sql")
    third = AdapterUse(metrics.adapters, "de")
    first.set_running()
    first.set_running()
    assert info() == 'running_lora_adapters="sql",waiting_lora_adapters="sql,de"'
    second.end(0, 0)
    third.set_running()
    assert info() == 'running_lora_adapters="sql,de",waiting_lora_adapters=""'
    first.end(20, 7)
    third.end(5, 1)
    assert info() == 'running_lora_adapters="",waiting_lora_adapters=""'
    text = metrics.render().decode()
    for name, numbers in (("requests", (2, 0, 1)), ("prompt_tokens", (20, 0, 5)), ("generation_tokens", (7, 0, 1))):
        for adapter, number in zip(("sql", "fr", "de"), numbers, strict=True):
            assert f'conveyor_engine_adapter_{name}_total{{adapter="{adapter}",model_name="m"}} {number}.0' in text
    del served["sql"]
    assert '"sql"' not in metrics.render().decode(), "an adapter that left has no series"


def test_a_model_without_adapters_has_no_values_for_them() -> None:
    lines = EngineMetrics("m").render().decode().splitlines()
    assert [line for line in lines if "lora_requests" in line or "adapter" in line]
    assert not [line for line in lines if ("lora" in line or "adapter" in line) and not line.startswith("#")]
