"""Describes the sizes that follow from `spec.workload`, for `status.effective.derived`. Pure; used by `status`.

The engine computes the same sizes when it starts (`conveyor_protocol.workload`). Only the engine can measure the free
memory, so sizes that depend on it are described in words.
"""

from collections.abc import Iterator

from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.status import DerivedStatus
from conveyor_protocol.workload import Workload


def describe_derived(spec: InferenceServiceSpec, context_length: int | None) -> list[DerivedStatus]:
    """Return each size that no field sets.

    spec: from `settled_spec`. context_length: the model's; None if it is not known yet.
    """
    if spec.workload is None:
        return []
    lengths = spec.workload.lengths
    derived = [*_describe_context(spec, lengths, context_length), _describe_warm_up(lengths)]
    if lengths.outputs is not None:
        derived += [*_describe_blocks(spec, lengths, context_length), _describe_graphs(spec, lengths)]
        derived += _describe_target(spec, lengths)
    return sorted(derived, key=lambda each: each.name)


def _describe_context(
    spec: InferenceServiceSpec, lengths: Workload, context_length: int | None
) -> Iterator[DerivedStatus]:
    if spec.engine.max_model_len is not None:
        return
    capacity = spec.kv_cache.capacity_tokens
    tokens = lengths.choose_context(context_length, capacity)
    reason = "1 of 10,000 requests is longer, if lengths are lognormal; rounded up to a power of two"
    if tokens < lengths.longest_tokens:
        reason = "kvCache.blockBudget holds no more" if tokens == capacity else "the model has no longer context"
    yield DerivedStatus(name="engine.maxModelLen", value=f"{tokens} tokens", reason=reason)


def _describe_blocks(
    spec: InferenceServiceSpec, lengths: Workload, context_length: int | None
) -> Iterator[DerivedStatus]:
    cache = spec.kv_cache
    if cache.block_budget is not None or cache.memory_percent is not None:
        return
    context = spec.engine.max_model_len or lengths.choose_context(context_length, None)
    batch_size = spec.batching.effective_batch_size
    blocks = lengths.count_blocks(batch_size, cache.block_size, context)
    reason = (
        f"enough for {batch_size} requests of {lengths.long_tokens} tokens (P95), or for one of the whole context. A "
        "CPU allocates no more; a GPU uses all its free memory, and spare blocks cache prefixes"
    )
    yield DerivedStatus(name="kvCache.blockBudget", value=f"{blocks} blocks", reason=reason)


def _describe_graphs(spec: InferenceServiceSpec, lengths: Workload) -> DerivedStatus:
    batch_size, capacity = spec.batching.effective_batch_size, spec.kv_cache.capacity_tokens
    rows = lengths.find_largest_graph(batch_size, capacity)
    if not rows:
        reason = "answers have one token, so no step decodes"
        return DerivedStatus(name="CUDA graphs of decodes", value="none", reason=reason)
    held = f"if the KV cache holds fewer requests of {lengths.short_tokens} tokens (P50)"
    reason = f"a batch ({batch_size} requests), or fewer {held}"
    return DerivedStatus(name="CUDA graphs of decodes", value=f"up to {rows} rows", reason=reason)


def _describe_warm_up(lengths: Workload) -> DerivedStatus:
    inputs = lengths.inputs
    steps = "a step with several prompts of P50 tokens, and a step with one prompt of P95 tokens"
    reason = f"{steps}, in addition to the largest step"
    return DerivedStatus(name="warm-up", value=f"prompts of {inputs.p50} and {inputs.p95} tokens", reason=reason)


def _describe_target(spec: InferenceServiceSpec, lengths: Workload) -> Iterator[DerivedStatus]:
    if (target := spec.in_flight_target) is None or spec.autoscaling is None:
        return
    batch_size, capacity = spec.batching.effective_batch_size, spec.kv_cache.capacity_tokens
    held = batch_size if capacity is None else min(batch_size, lengths.count_held(capacity))
    value, percent = target * held / batch_size, spec.autoscaling.target_utilization_percent
    reason = (
        f"{percent} % (autoscaling.targetUtilizationPercent) of {held}, the number of requests of mean length "
        f"({lengths.mean_tokens} tokens) that an engine should hold"
    )
    if capacity is None:
        reason += ". An engine whose KV cache holds fewer reports its own number"
    yield DerivedStatus(name="requests in flight per replica", value=f"{round(value, 1):g}", reason=reason)
