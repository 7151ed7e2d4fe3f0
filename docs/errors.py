"""Prints errors.md, from the tables that gateway, engine and metrics server answer by: `python docs/errors.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

from collections.abc import Iterable, Iterator

from conveyor_engine.errors import ErrorCode
from conveyor_gateway.errors import Code
from conveyor_metrics.errors import StatusReason
from conveyor_protocol.answer_codes import AnswerCode

_HEAD = """\
# Errors

Written by `make generate` from the programs' own tables; do not edit.
[Troubleshooting](troubleshooting.md#a-client-gets-an-error) says what to do about an error.

A client of a service can get errors from the gateway, and from the engine that handles its request. Both have
OpenAI's format, `{"error": {"message", "type", "param", "code"}}`. On [Anthropic's paths](other-apis.md), errors have
Anthropic's format, with the same code. On the paths of other APIs, errors have [the format of that API](openai-api.md).
Responses with status 429 or 503 have the header `Retry-After`.
"""
_METRICS_HEAD = """
## Metrics server
Errors are `metav1.Status` objects. The HorizontalPodAutoscaler shows their message.

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
    for reason in StatusReason:
        yield f"| {reason.status} | `{reason}` | {reason.meaning} |\n"


if __name__ == "__main__":
    print("".join(page()), end="")
