"""Prints errors.md, from the tables that gateway, engine and metrics server answer by: `python docs/errors.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

from collections.abc import Iterable, Iterator

from conveyor_engine.errors import ErrorCode
from conveyor_gateway.errors import Code
from conveyor_metrics.errors import Reason
from conveyor_protocol.answer_codes import AnswerCode

_HEAD = """\
# Errors

Written by `make generate` from the tables that the programs answer by; do not edit. What to do about them:
[troubleshooting](troubleshooting.md#a-client-gets-an-error).

A client of a service reads the gateway's errors, and the engine's where an engine has judged the request. Both have
OpenAI's form, `{"error": {"message", "type", "param", "code"}}`. [Anthropic's paths](other-apis.md) have Anthropic's
form, with the same code. 429 and 503 carry `Retry-After`.
"""
_METRICS_HEAD = """
## Metrics server
A refusal is a `metav1.Status`; the HorizontalPodAutoscaler shows its message.

| status | reason | meaning |
| --- | --- | --- |
"""


def table(title: str, codes: Iterable[AnswerCode]) -> Iterator[str]:
    yield f"\n## {title}\n| status | type | code | meaning |\n| --- | --- | --- | --- |\n"
    for code in codes:
        yield f"| {code.status} | `{code.type}` | `{code}` | {code.meaning} |\n"


def page() -> Iterator[str]:
    yield _HEAD
    yield from table("Gateway", Code)
    yield from table("Engine", ErrorCode)
    yield _METRICS_HEAD
    for reason in Reason:
        yield f"| {reason.status} | `{reason}` | {reason.meaning} |\n"


if __name__ == "__main__":
    print("".join(page()), end="")
