"""Generates the requests of Anyscale's article on continuous batching (2023). Used by `virtual` and `measured`."""

from collections.abc import Iterator
from random import Random

from conveyor_engine.wire.request import EngineRequest, SamplingParams

CAPS = (32, 128, 512, 1536)
PROMPT_TOKENS = 512
MEAN_OUTPUT_TOKENS = 128


def throughput_requests(number: int, cap: int, vocab_size: int) -> list[EngineRequest]:
    """Return requests that arrive at once, with prompts of 512 tokens.

    The lengths of outputs are exponential with mean 128; only lengths up to `cap` are kept.
    """
    random = Random(cap)
    lengths = [_kept_output_tokens(random, cap) for _ in range(number)]
    return list(_requests(random, [PROMPT_TOKENS] * number, lengths, [0.0] * number, vocab_size))


def latency_requests(number: int, requests_per_second: float, vocab_size: int) -> list[EngineRequest]:
    """Return requests with Poisson arrivals, and prompts of 1 to 512 tokens.

    The lengths of outputs are exponential with mean 128, cut at 1,536.
    """
    random = Random(number)
    prompts = [random.randint(1, PROMPT_TOKENS) for _ in range(number)]
    lengths = [min(CAPS[-1], max(1, round(random.expovariate(1 / MEAN_OUTPUT_TOKENS)))) for _ in range(number)]
    gaps = [random.expovariate(1) / requests_per_second for _ in range(number)]
    arrivals = [sum(gaps[: index + 1]) for index in range(number)]
    return list(_requests(random, prompts, lengths, arrivals, vocab_size))


def output_tokens(request: EngineRequest) -> int:
    """Return the length of the request's answer, which never ends early."""
    assert request.params is not None
    return request.params.max_tokens


def _kept_output_tokens(random: Random, cap: int) -> int:
    while (length := max(1, round(random.expovariate(1 / MEAN_OUTPUT_TOKENS)))) > cap:
        pass
    return length


def _requests(
    random: Random, prompts: list[int], lengths: list[int], arrivals: list[float], vocab_size: int
) -> Iterator[EngineRequest]:
    for number, (prompt, length, arrival) in enumerate(zip(prompts, lengths, arrivals, strict=True)):
        yield EngineRequest(
            request_id=str(number),
            prompt_token_ids=random.choices(range(vocab_size), k=prompt),
            params=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
            arrival_time=arrival,
        )
