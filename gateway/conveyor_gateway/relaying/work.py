"""Estimates how many tokens a request will use, and finds how many it has used. Pure. Used by `request_life`.

The gateway does not tokenize. Conveyor's engines report the tokens of each request. For other runtimes, the bytes of
the answer are an estimate.
"""

from typing import Final

from conveyor_gateway.admission.ticket import Work
from conveyor_gateway.engines.exchange import EngineAnswer
from conveyor_gateway.relaying.bodies import QueueFields
from conveyor_gateway.relaying.images import estimate_image_bytes
from conveyor_gateway.watching.catalog import Service

BYTES_PER_TOKEN: Final = 4
_IMAGE_BYTES_PER_TOKEN: Final = 256  # in base64: a JPEG of a megapixel has about 300 KB, and 1,300 tokens in Qwen-VL
_EVENT_BYTES: Final = 256  # of a stream's event, which has about one token
_UNKNOWN_LENGTH_TOKENS: Final = 4096


def estimate_work(service: Service, body: bytes, fields: QueueFields, may_generate: bool) -> Work:
    """Return the expected tokens of the prompt, and the most that the answer may have."""
    longest = service.max_model_len or _UNKNOWN_LENGTH_TOKENS
    answer_tokens = fields.count_answer_tokens(longest) if may_generate else 0
    image_bytes = (
        estimate_image_bytes(body) if service.task else 0
    )  # nothing corrects a client's trick on other runtimes
    prompt_tokens = (len(body) - image_bytes) // BYTES_PER_TOKEN + image_bytes // _IMAGE_BYTES_PER_TOKEN
    return Work(min(prompt_tokens, longest), answer_tokens)


def find_work(answer: EngineAnswer, expected: Work, sent_bytes: int) -> Work:
    """Return what a request has used, without the tokens of its prompt that were cached.

    An error without a report counts as no tokens. sent_bytes: of its answer.
    """
    usage = answer.usage
    estimate = sent_bytes // (_EVENT_BYTES if answer.is_event_stream else BYTES_PER_TOKEN)
    if usage is None:
        if answer.status >= 400:
            return Work(0)
        return Work(expected.prompt_tokens, min(estimate, expected.answer_tokens))
    answer_tokens = usage.completion_tokens
    if answer.awaits_report:  # the client left, and the report is that of the first tokens
        answer_tokens = max(answer_tokens, min(estimate, int(expected.answer_tokens)))
    return Work(max(0, usage.prompt_tokens - usage.cached_tokens), answer_tokens)
