"""What the engine's own metrics make of its steps."""

from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.wire.messages import Step
from conveyor_engine.wire.request import EngineStats, FinishReason, RequestOutput


def test_a_step_that_only_tells_of_an_abort_is_no_sample_of_the_batch() -> None:
    metrics = EngineMetrics("m")
    stats = EngineStats(num_steps=1, step_num_seqs=3, prompt_tokens=37, generation_tokens=3, num_running=3)
    metrics.observe_step(Step([], stats, 3))
    gone = RequestOutput(request_id="a", finish_reason=FinishReason.ABORT)
    metrics.observe_step(Step([gone], EngineStats(num_steps=1, prompt_tokens=37, generation_tokens=3), 3))
    text = metrics.render().decode()
    assert 'conveyor_engine_batch_size_count{model_name="m"} 1.0' in text
    assert 'vllm:iteration_tokens_total_sum{model_name="m"} 40.0' in text
    assert 'vllm:num_requests_running{model_name="m"} 0.0' in text, "the gauges are the newest"
