"""Says in one sentence where the time of a request went, from the receipt that its gateway keeps. Pure."""

from typing import Final, NamedTuple

from conveyor_protocol.usage import EngineReceipt, RequestReceipt

_SHOWN_SHARE: Final = 0.01  # smaller parts of the time are not named
_CLOSED: Final = {
    "cost": "the cost of its batch",
    "drain": "the end of the engine",
    "eager": "the batch before it",
    "full": "a full batch",
    "kv_blocks": "the KV cache",
    "window": "the window",
}


class _Part(NamedTuple):
    seconds: float
    words: str


def explain_receipt(receipt: RequestReceipt) -> str:
    """Return the sentence, with the longest part of the time first."""
    parts = [part for part in _divide(receipt) if part.seconds >= _SHOWN_SHARE * receipt.seconds]
    parts.sort(key=lambda part: -part.seconds)
    where = "; ".join(f"{_show(part.seconds)} {part.words}" for part in parts)
    return f"{_begin(receipt)} in {_show(receipt.seconds)}: {where or 'no part of it took long'}.{_add_cost(receipt)}"


def _begin(receipt: RequestReceipt) -> str:
    service = receipt.service or "the gateway"
    if receipt.reason == "-":
        return f"{service} answered {receipt.request_id} with {receipt.status}"
    return f"{service} ended {receipt.request_id} with {receipt.status} ({receipt.reason})"


def _divide(receipt: RequestReceipt) -> list[_Part]:
    """Return the parts of the time. What the engine did not report is one part."""
    retries = f", for {receipt.attempts} attempts" if receipt.attempts > 1 else ""
    queued = _Part(receipt.queue_seconds, f"in the gateway's queue{retries}")
    at_engine = receipt.engine_seconds
    rest = _Part(receipt.seconds - receipt.queue_seconds - at_engine, "in the gateway, reading the request or writing")
    used = None if receipt.used is None else receipt.used.receipt
    if used is None or receipt.used is None:
        return [queued, _Part(at_engine, "at the engine, which reports no details"), rest]
    beside = f"beside {used.neighbours:g} other requests" if used.neighbours else "with no other request in the batch"
    again = f", after {used.preempted} preemptions" if used.preempted else ""
    closed = f", which {_CLOSED.get(used.closed_by, used.closed_by)} ended" if used.closed_by else ""
    tokens = receipt.used
    uncached = tokens.prompt_tokens - tokens.cached_tokens
    parts = [
        _Part(used.queue_ms / 1000, "in the engine's queue"),
        _Part(used.batch_wait_ms / 1000, f"waiting for its batch{closed}"),
        _Part(used.prefill_ms / 1000, f"computing {uncached} of {tokens.prompt_tokens} prompt tokens {beside}"),
        _Part(used.decode_ms / 1000, f"generating {tokens.completion_tokens} tokens {beside}{again}"),
    ]
    known = sum(part.seconds for part in parts)
    other = _Part(at_engine - known, "at the engine, before and after its steps: tokenizing, writing the answer")
    return [queued, *parts, other, rest]


def _add_cost(receipt: RequestReceipt) -> str:
    used: EngineReceipt | None = None if receipt.used is None else receipt.used.receipt
    if used is None:
        return ""
    padding = f", {used.padding_ms / used.engine_ms:.0%} of it padding" if used.padding_ms and used.engine_ms else ""
    return f" It cost {_show(used.engine_ms / 1000)} of the engine's steps{padding}."


def _show(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
