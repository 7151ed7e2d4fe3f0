"""Recommends a batching mode and a batch limit by the decision flow of docs/batching.md. Pure; it measures nothing.

Questions that the observed traffic does not answer are reported as open; `tuning` measures them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from conveyor_api.resource import InferenceService
from conveyor_insight.traffic import Traffic
from conveyor_protocol.tasks import TASKS, Allows

MIN_REQUESTS: Final = 100
"""The least number of observed requests with which lengths and batch limits are recommended."""
_FULL: Final = 0.9
_MOST_PREEMPTED: Final = 0.01
_MOST_ROWS: Final = 1024
_ALIKE: Final = 1.25
_UNLIKE: Final = 1.5
_SHORT_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation, with the reasons in `sentences`.

    `fields` has the members of `spec.batching` to change; it is empty if none has to change. `workload` is the new
    `spec.workload`; it is None if the declared one stays.
    """

    mode: str
    max_batch_size: int
    fields: dict[str, Any]
    workload: dict[str, Any] | None
    sentences: tuple[str, ...]
    tune_flags: tuple[str, ...]
    """Flags that make `tune` send requests of the observed lengths, with the observed latencies as objectives."""


def advise(service: InferenceService, traffic: Traffic) -> Advice:
    """Return the recommendation for a service and the traffic that its engines have observed."""
    mode, mode_reason = _choose_mode(service, traffic)
    size, size_reason = _choose_size(service, traffic, mode)
    batching = service.batching
    fields: dict[str, Any] = {}
    if mode != batching.mode:
        fields["mode"] = mode
    if size != batching.chosen_batch_size:
        fields["maxBatchSize"] = size
    workload, about_workload = _choose_workload(service, traffic)
    about_window = _describe_window(service, traffic, mode)
    sentences = (mode_reason, size_reason, *about_window, *_describe_drafts(traffic), *about_workload)
    return Advice(mode, size, fields, workload, sentences, tuple(_build_tune_flags(service, traffic)))


def _choose_workload(service: InferenceService, traffic: Traffic) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the observed lengths if they should be declared, and sentences that compare observed and declared ones."""
    has_lengths = service.spec.runtime != "VLLM" and _allows(service).workload
    if not has_lengths or traffic.requests < MIN_REQUESTS:
        return None, []
    observed = {"inputTokens": _measure(traffic, "prompt_tokens")}
    if not _allows(service).one_step and traffic["output_tokens"].number >= MIN_REQUESTS:
        observed["outputTokens"] = _measure(traffic, "output_tokens")
    declared = service.spec.workload.to_manifest() if service.spec.workload else {}
    sentences = [
        f"workload.{name}: observed {_describe_lengths(lengths)}, declared {_describe_lengths(declared.get(name))}."
        for name, lengths in observed.items()
    ]
    differ = any(_differ(lengths, declared.get(name)) for name, lengths in observed.items())
    if not differ:
        return None, sentences
    return {**declared, **observed}, [*sentences, "Declared lengths size the engines; a change restarts them."]


def _measure(traffic: Traffic, name: str) -> dict[str, int]:
    p50 = max(1, round(traffic[name].percentile(50)))
    return {"p50": p50, "p95": max(p50, round(traffic[name].percentile(95)))}


def _describe_lengths(lengths: dict[str, int] | None) -> str:
    return "nothing" if lengths is None else f"{lengths['p50']} tokens at P50 and {lengths['p95']} at P95"


def _differ(observed: dict[str, int], declared: dict[str, int] | None) -> bool:
    """Return whether lengths differ by more than the error of histogram buckets that are powers of two."""
    if declared is None:
        return True
    return any(not 1 / _UNLIKE <= observed[name] / declared[name] <= _UNLIKE for name in observed)


def _choose_mode(service: InferenceService, traffic: Traffic) -> tuple[str, str]:
    if service.spec.runtime == "VLLM":
        return "Continuous", "Continuous: vLLM has no other mode."
    if service.task is None:
        text = "the model's task is not known until an engine has read its files; Continuous fits models that generate"
        mode = str(service.batching.mode)
        return mode, f"{mode}: {text}, Dynamic all others."
    if _allows(service).one_step:
        return "Dynamic", f"Dynamic: task {service.task} takes one step, so requests share a batch and leave together."
    if not _allows(service).workload:
        steps = "denoising steps" if service.task == "ImageGenerate" else "tokens"
        return "Continuous", f"Continuous: requests join and leave between two {steps} of the others."
    text = "Continuous: the model generates text, and in this mode requests join and leave at every step."
    lengths = traffic["output_tokens"]
    if lengths.number >= MIN_REQUESTS:
        p50, p95 = lengths.percentile(50), lengths.percentile(95)
        text += f" Answers have {p50:.0f} tokens at P50 and {p95:.0f} at P95;"
        if p95 <= _ALIKE * p50 or p95 <= _SHORT_TOKENS:
            text += " they are alike or short, so Static would lose little offline."
        else:
            text += " the more they differ, the more a closed batch waits for its longest."
    if service.batching.mode == "None":
        text += " Keep None only if requests must never share a step."
    return "Continuous", text


def _choose_size(service: InferenceService, traffic: Traffic, mode: str) -> tuple[int, str]:
    size = service.batching.chosen_batch_size
    if traffic.requests < MIN_REQUESTS:
        return size, (
            f"maxBatchSize {size} stays: the engines have seen {traffic.requests} requests, but advice "
            f"needs at least {MIN_REQUESTS}."
        )
    fits = _find_fitting(service, traffic, mode)
    preempted = traffic.preemptions / traffic.requests
    if preempted > _MOST_PREEMPTED and fits is not None and fits < size:
        return fits, (
            f"maxBatchSize {fits}: {preempted:.0%} of requests were preempted, and the KV cache of {traffic.kv_tokens} "
            f"tokens holds {fits} requests of the usual length. More blocks would help too."
        )
    return _follow_fill(service, traffic, size, fits)


def _follow_fill(service: InferenceService, traffic: Traffic, size: int, fits: int | None) -> tuple[int, str]:
    fill, wait, latency = traffic["batch_size"], traffic["queue"].percentile(95), traffic["latency"].percentile(95)
    if not fill.number:
        return size, f"maxBatchSize {size} stays: the engines do not report how full their batches are."
    usual = fill.percentile(95)
    if usual < _FULL * size:
        return size, f"maxBatchSize {size} stays: steps have {usual:.0f} requests at P95, so the limit has no effect."
    larger = max(size, min(2 * size, _MOST_ROWS, size if fits is None else fits))
    if wait < 0.1 * latency or larger == size:
        why = "requests hardly wait" if wait < 0.1 * latency else _explain_limit(size, fits)
        return size, f"maxBatchSize {size} stays: batches are full, but {why} (engine queue P95 {wait * 1000:.0f} ms)."
    slower = "request" if _has_no_cache(service) else "token"
    return larger, (
        f"maxBatchSize {larger}: batches are full, and requests wait {wait:.2g} s in the engine's queue at P95. "
        f"A larger batch makes each {slower} slower: measure with tune what it costs."
    )


def _explain_limit(size: int, fits: int | None) -> str:
    if fits is None:
        return "the engines do not report the size of their KV cache"
    if size >= _MOST_ROWS:
        return f"{_MOST_ROWS} is the most that is ever advised"
    return "the KV cache holds no more requests"


def _has_no_cache(service: InferenceService) -> bool:
    allows = _allows(service)
    return not (allows.kv_cache and allows.workload)


def _allows(service: InferenceService) -> Allows:
    """Return what the service's task allows. A task that is not known yet counts as Generate."""
    return TASKS[service.task or "Generate"]


def _find_fitting(service: InferenceService, traffic: Traffic, mode: str) -> int | None:
    """Return how many requests an engine holds at once, by its KV cache; None if the cache's size is not known.

    Mode Continuous allocates blocks while a request grows, so a request counts with the mean length. In other modes a
    request counts with the P95 length.
    """
    if _has_no_cache(service):
        return _MOST_ROWS
    if traffic.kv_tokens is None:
        return None
    prompts, outputs = traffic["prompt_tokens"], traffic["output_tokens"]
    usual, longest = prompts.mean + outputs.mean, prompts.percentile(95) + outputs.percentile(95)
    return max(1, int(traffic.kv_tokens / max(1, usual if mode == "Continuous" else longest)))


def _describe_window(service: InferenceService, traffic: Traffic, mode: str) -> Iterator[str]:
    window = service.batching.effective_window
    if mode not in ("Static", "Dynamic") or window is None:
        return
    closes = sum(traffic.closes.values())
    if not closes:
        yield f"window {window} stays: no batch has closed yet."
        return
    full = traffic.closes["full"] / closes
    if full > 0.5:
        yield f"window {window} stays: {full:.0%} of batches close because they are full, so it has little effect."
    else:
        yield (
            f"window {window}: {1 - full:.0%} of batches close before they are full. Their first requests wait for the "
            "whole window, so keep it below a tenth of the latency that clients accept."
        )


def _build_tune_flags(service: InferenceService, traffic: Traffic) -> Iterator[str]:
    """Yield the flags for the observed lengths, and for the observed latencies as objectives."""
    if traffic.requests < MIN_REQUESTS:
        return
    yield f"--input-tokens {_build_lengths(traffic, 'prompt_tokens')}"
    if traffic["output_tokens"].number and not _has_no_cache(service):
        yield f"--output-tokens {_build_lengths(traffic, 'output_tokens')}"
        ttft, itl = (max(1, round(traffic[name].percentile(95) * 1000)) for name in ("ttft", "itl"))
        yield f"--objective ttft={ttft}ms,itl={itl}ms"
    elif traffic["latency"].number:
        yield f"--objective latency={max(1, round(traffic['latency'].percentile(95) * 1000))}ms"


def _build_lengths(traffic: Traffic, name: str) -> str:
    return ",".join(map(str, _measure(traffic, name).values()))


def _describe_drafts(traffic: Traffic) -> Iterator[str]:
    if traffic.drafts and traffic.tokens:
        accepted, saved = traffic.accepted_drafts / traffic.drafts, traffic.accepted_drafts / traffic.tokens
        yield (
            f"speculation: {accepted:.0%} of the computed drafts were accepted; {saved:.0%} of all tokens were drafts."
        )
