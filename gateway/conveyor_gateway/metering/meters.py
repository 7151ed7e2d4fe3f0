"""Limits what callers use: requests and tokens in a minute, tokens in a day, and requests at a time.

Built by `server`; `relaying` asks for each request. A caller's request counts for up to three subjects: its key, the
key's owner and its namespace, each with limits of its own. A prompt counts before it is sent, with an estimate of its
tokens; an answer counts as it is streamed; and the engine's report corrects both at the end. Each gateway allows an
equal share of each limit, at least one request.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from conveyor_gateway.caller import Caller, Limits
from conveyor_gateway.errors import RateLimited
from conveyor_gateway.given_limits import GivenLimits
from conveyor_gateway.metering.bucket import Bucket, write_wait
from conveyor_protocol.usage import UsedTokens

MAX_METERS: Final = 20_000  # the one that was used longest ago is dropped
_DAY_SECONDS: Final = 86_400


class _Minute(NamedTuple):
    """What is left of a minute's limit, and how much this gateway may give."""

    bucket: Bucket
    amount: int


@dataclass(slots=True, eq=False)
class _Day:
    """The tokens of one day. Each day has an object of its own, which later corrections of its requests change."""

    number: int
    tokens: float = 0.0


@dataclass(slots=True, eq=False)
class _Meter:
    """What one subject has left, and has used. A minute is None without such a limit."""

    day: _Day
    requests: _Minute | None = None
    tokens: _Minute | None = None
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class _Metered:
    """A subject of one request, and its limits when the request came; None: no limit."""

    subject: str  # for messages
    meter: _Meter
    requests: _Minute | None
    tokens: _Minute | None
    day: _Day
    day_tokens: float | None
    at_a_time: int | None


class Meters:
    """The meters of all subjects with limits. `count_gateways` returns how many gateways share the limits."""

    def __init__(
        self,
        given: GivenLimits | None,
        count_gateways: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._given = given or GivenLimits()
        self._has_given = self._given != GivenLimits()
        self._count_gateways = count_gateways
        self._now = now
        self._unix = unix
        self._began_unix = unix()
        self._meters: OrderedDict[str, _Meter] = OrderedDict()

    def enter(self, caller: Caller | None, prompt_tokens: float) -> "MeteredRequest | None":
        """Count a request. Return None if no limit is set for its caller. Raises RateLimited."""
        if caller is None:
            return None
        limited = self._given.find(caller) if self._has_given else []
        if caller.limits is not None:
            limited = [(f"the key {caller.name}", caller.limits), *limited]
        if not limited:
            return None
        now, unix = self._now(), self._unix()
        subjects = [self._find(subject, limits, now, unix) for subject, limits in limited]
        for each in subjects:
            _check(each, prompt_tokens, now, unix)
        return MeteredRequest(subjects, prompt_tokens, self._now)

    def _find(self, subject: str, limits: Limits, now: float, unix: float) -> _Metered:
        num_gateways = self._count_gateways()

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // num_gateways)

        requests, tokens, day_tokens = map(
            share, (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day)
        )
        day = int(unix // _DAY_SECONDS)
        meter = self._meters.get(subject)
        if meter is None:
            meter = self._meters[subject] = _Meter(_Day(day))
            if len(self._meters) > MAX_METERS:
                self._meters.popitem(last=False)
        self._meters.move_to_end(subject)
        meter.requests, meter.tokens = _fit(meter.requests, requests, now), _fit(meter.tokens, tokens, now)
        if meter.day.number != day:
            meter.day = _Day(day)
        allowed = None if day_tokens is None else day_tokens * self._find_allowance(day)
        at_a_time = share(limits.concurrent_requests)
        return _Metered(subject, meter, meter.requests, meter.tokens, meter.day, allowed, at_a_time)

    def _find_allowance(self, day: int) -> float:
        """Return the part of a day's tokens that this process may give.

        What an earlier process gave is not known. So on the day of its start, a process gives the part of the rest.
        """
        began_day, of_day = divmod(self._began_unix, _DAY_SECONDS)
        return 1 - of_day / _DAY_SECONDS if day == began_day else 1.0


def _fit(before: _Minute | None, amount: int | None, now: float) -> _Minute | None:
    """Return the minute for this limit: a full one if there was no limit before."""
    if amount is None:
        return None
    return _Minute(Bucket(amount, now) if before is None else before.bucket, amount)


def _check(each: _Metered, prompt_tokens: float, now: float, unix: float) -> None:
    """Raise RateLimited if a limit is reached."""
    if each.at_a_time is not None and each.meter.num_open >= each.at_a_time:
        raise RateLimited(f"{each.subject} has {each.at_a_time} requests at a time, its limit at this gateway", 1.0)
    if each.requests is not None:
        bucket, amount = each.requests
        if bucket.find_left(amount, now) < 1:
            message = f"{each.subject} may send {amount} requests in a minute to this gateway"
            raise RateLimited(message, bucket.find_wait_seconds(1, amount), _write_headers(each, now))
    if each.tokens is not None:
        bucket, amount = each.tokens
        needed = max(1, min(prompt_tokens, amount))  # a longer prompt needs a full bucket
        if bucket.find_left(amount, now) < needed:
            message = f"{each.subject} may use {amount} tokens in a minute at this gateway"
            raise RateLimited(message, bucket.find_wait_seconds(needed, amount), _write_headers(each, now))
    if each.day_tokens is not None and each.day.tokens >= each.day_tokens:
        message = f"{each.subject} has used its {each.day_tokens:.0f} tokens of this day (UTC) at this gateway"
        raise RateLimited(message, _DAY_SECONDS - unix % _DAY_SECONDS)


def _write_headers(each: _Metered, now: float) -> dict[str, str]:
    """Return OpenAI's headers for the limits of a minute."""
    headers = {}
    for name, minute in (("requests", each.requests), ("tokens", each.tokens)):
        if minute is not None:
            bucket, limit = minute
            left = bucket.find_left(limit, now)
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(left)))
            headers[f"x-ratelimit-reset-{name}"] = write_wait(bucket.find_wait_seconds(limit, limit))
    return headers


class MeteredRequest:
    """One request that counts. Call `leave` at its end, and then `settle` or `give_back`."""

    __slots__ = ("_counted_tokens", "_now", "_subjects")

    def __init__(self, subjects: list[_Metered], prompt_tokens: float, now: Callable[[], float]) -> None:
        self._subjects = subjects
        self._now = now
        self._counted_tokens = 0.0
        for each in subjects:
            each.meter.num_open += 1
        self._count_request(1)
        self.count_tokens(prompt_tokens)

    def count_tokens(self, num_tokens: float) -> None:
        """Count tokens of the answer, for example as they are streamed; negative ones to correct the count."""
        self._counted_tokens += num_tokens
        for each in self._subjects:
            if each.tokens is not None:
                each.tokens.bucket.take(num_tokens)
            each.day.tokens += num_tokens

    def write_headers(self) -> dict[str, str]:
        """Return OpenAI's headers for the subject with the smallest part of its limits left."""
        now = self._now()
        return min((_write_headers(each, now) for each in self._subjects), key=_find_part)

    def leave(self) -> None:
        """Record that the request has ended."""
        for each in self._subjects:
            each.meter.num_open -= 1

    def settle(self, usage: UsedTokens | None) -> None:
        """Correct the counts. usage: what the engine reports; without it, the counts stay."""
        if usage is not None:
            self.count_tokens(usage.prompt_tokens + usage.completion_tokens - self._counted_tokens)

    def give_back(self) -> None:
        """Count nothing for the request, because no engine processed it."""
        self._count_request(-1)
        self.count_tokens(-self._counted_tokens)

    def _count_request(self, number: int) -> None:
        for each in self._subjects:
            if each.requests is not None:
                each.requests.bucket.take(number)


def _find_part(headers: dict[str, str]) -> float:
    """Return the smallest part that is left of a limit; 1 without limits of a minute."""
    parts = (
        int(headers[f"x-ratelimit-remaining-{name}"]) / int(headers[f"x-ratelimit-limit-{name}"])
        for name in ("requests", "tokens")
        if f"x-ratelimit-limit-{name}" in headers
    )
    return min(parts, default=1.0)
