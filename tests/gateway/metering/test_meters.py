"""Tests the limits of keys, owners and namespaces, with a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.caller import Caller, Limits
from conveyor_gateway.errors import Code, RateLimited
from conveyor_gateway.given_limits import GIVEN_LIMITS, GivenLimits
from conveyor_gateway.metering.meters import MAX_METERS, MeteredRequest, Meters
from conveyor_protocol.usage import UsedTokens

DAY = 86_400


class Clock:
    """Meters and a clock. `given`: limits of namespaces and owners, as the setting has them."""

    def __init__(self, given: str = "{}", num_gateways: int = 1, of_day: float = 0.0) -> None:
        self.now = 1000.0
        self.began = 100 * DAY + of_day
        self.num_gateways = num_gateways
        limits = GIVEN_LIMITS.parse(given)
        assert isinstance(limits, GivenLimits)
        self.meters = Meters(limits, lambda: self.num_gateways, lambda: self.now, lambda: self.began + self.now - 1000)

    def enter(self, caller: Caller | None, prompt_tokens: float = 1) -> MeteredRequest:
        found = self.meters.enter(caller, prompt_tokens)
        assert found is not None
        return found

    def refuse(self, caller: Caller, prompt_tokens: float = 1) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            self.meters.enter(caller, prompt_tokens)
        assert (caught.value.code, caught.value.status) == (Code.RATE_LIMITED, 429)
        return caught.value


def make_caller(name: str = "team/key", owner: str = "", **limits: int) -> Caller:
    return Caller(name, name.partition("/")[0], owner, limits=Limits(**limits) if limits else None)


def test_who_has_no_limits_is_not_metered() -> None:
    clock = Clock('{"namespaces": {"other": {"requestsPerMinute": 1}}}')
    assert clock.meters.enter(None, 1) is None
    assert clock.meters.enter(make_caller(), 1) is None


def test_a_minute_allows_its_requests_at_once_and_then_evenly() -> None:
    clock, caller = Clock(), make_caller(requests_per_minute=6)
    for _ in range(6):
        clock.enter(caller)
    refused = clock.refuse(caller)
    assert refused.headers == {
        "Retry-After": "10",
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    assert "the key team/key may send 6 requests in a minute" in str(refused)
    clock.now += 10
    clock.enter(caller)
    clock.refuse(caller)


def test_tokens_count_the_prompt_before_the_answer_and_the_report_at_its_end() -> None:
    clock, caller = Clock(), make_caller(tokens_per_minute=100)
    request = clock.enter(caller, prompt_tokens=40)
    request.count_tokens(20)
    assert request.write_headers()["x-ratelimit-remaining-tokens"] == "40"
    assert clock.refuse(caller, prompt_tokens=41).headers["Retry-After"] == "1"
    request.settle(UsedTokens(30, 10, 20))
    assert request.write_headers()["x-ratelimit-remaining-tokens"] == "50"
    clock.enter(caller, prompt_tokens=50)


def test_an_answer_longer_than_what_is_left_makes_later_requests_wait_for_it() -> None:
    clock, caller = Clock(), make_caller(tokens_per_minute=60)
    clock.enter(caller, 10).count_tokens(110)
    assert clock.refuse(caller).headers["Retry-After"] == "61"
    clock.now += 61
    clock.enter(caller)


def test_a_prompt_longer_than_a_minutes_tokens_needs_a_full_minute() -> None:
    clock, caller = Clock(), make_caller(tokens_per_minute=60)
    clock.enter(caller, 1)
    clock.refuse(caller, 1000)
    clock.now += 1
    clock.enter(caller, 1000)


def test_requests_at_a_time_count_until_their_end() -> None:
    clock, caller = Clock(), make_caller(concurrent_requests=2)
    first, _ = clock.enter(caller), clock.enter(caller)
    assert clock.refuse(caller).headers == {"Retry-After": "1"}
    first.leave()
    clock.enter(caller)


def test_a_days_tokens_end_at_midnight_in_utc() -> None:
    clock, caller = Clock(), make_caller(tokens_per_day=100)
    clock.enter(caller, 100)
    clock.now += DAY - 30
    assert clock.refuse(caller).headers["Retry-After"] == "30"
    clock.now += 30
    clock.enter(caller)


def test_a_gateway_that_starts_during_the_day_gives_the_rest_of_the_days_part() -> None:
    """It does not know what it gave before, so a restart gives at most this part twice."""
    clock, caller = Clock(of_day=0.75 * DAY), make_caller(tokens_per_day=100)
    clock.enter(caller, 25)
    clock.refuse(caller)
    clock.now += DAY / 4
    clock.enter(caller, 99)
    clock.enter(caller, 1)


def test_a_key_first_used_late_in_the_day_has_all_of_the_days_tokens() -> None:
    clock, caller = Clock(of_day=0.75 * DAY), make_caller(tokens_per_day=100)
    clock.now += 1.2 * DAY
    clock.enter(caller, 99)
    clock.enter(caller, 1)
    assert "has used its 100 tokens" in str(clock.refuse(caller))


def test_a_request_that_no_engine_processed_counts_for_no_limit() -> None:
    clock = Clock()
    caller = make_caller(requests_per_minute=1, tokens_per_minute=100, tokens_per_day=100)
    for _ in range(10):
        request = clock.enter(caller, 90)
        request.leave()
        request.give_back()
    clock.enter(caller, 90)


def test_tokens_of_yesterday_that_are_corrected_today_give_today_no_more() -> None:
    clock, caller = Clock(), make_caller(tokens_per_day=100)
    request = clock.enter(caller, 90)
    clock.now += DAY
    clock.enter(caller, 100)
    request.settle(UsedTokens(10, 0, 0))
    clock.refuse(caller)


def test_the_limits_of_key_owner_and_namespace_all_hold_and_the_message_names_the_one_that_is_reached() -> None:
    clock = Clock(
        '{"namespaces": {"team": {"requestsPerMinute": 5}, "*": {"requestsPerMinute": 1}},'
        ' "owners": {"team/ann": {"requestsPerMinute": 2}}}'
    )
    ann = [make_caller(f"team/ann-{number}", "ann", requests_per_minute=1) for number in range(3)]
    clock.enter(ann[0])
    assert "the key team/ann-0" in str(clock.refuse(ann[0]))
    clock.enter(ann[1])
    assert "the owner team/ann " in str(clock.refuse(ann[2]))
    for number in range(3):
        clock.enter(make_caller(f"team/bob-{number}", "bob"))
    assert "the namespace team " in str(clock.refuse(make_caller("team/bob-3", "bob")))
    clock.enter(make_caller("else/any"))
    assert "the namespace else " in str(clock.refuse(make_caller("else/any")))


def test_a_request_that_one_limit_refuses_counts_for_no_other() -> None:
    clock = Clock('{"namespaces": {"team": {"requestsPerMinute": 2}}}')
    key = make_caller("team/a", requests_per_minute=1)
    clock.enter(key)
    clock.refuse(key)
    clock.enter(make_caller("team/b"))


def test_each_gateway_has_an_equal_share_and_one_at_least() -> None:
    clock, caller = Clock(num_gateways=4), make_caller(requests_per_minute=8, concurrent_requests=3)
    clock.enter(caller).leave()
    clock.enter(caller)
    clock.refuse(caller)
    clock.num_gateways = 1
    clock.now += 60
    for _ in range(2):
        clock.enter(caller)
    clock.refuse(caller)


def test_a_changed_key_has_its_new_limits_at_once() -> None:
    clock = Clock()
    clock.enter(make_caller(requests_per_minute=1))
    clock.refuse(make_caller(requests_per_minute=1))
    clock.now += 1
    clock.enter(make_caller(requests_per_minute=100))
    assert clock.meters.enter(make_caller(), 1) is None


def test_what_a_key_used_before_it_had_a_limit_does_not_count_for_the_limit() -> None:
    clock = Clock()
    for _ in range(50):
        running = clock.enter(make_caller(tokens_per_day=10_000), 100)
    limited = make_caller(tokens_per_day=10_000, requests_per_minute=2, tokens_per_minute=100)
    clock.enter(limited, 50)
    clock.enter(limited, 50)
    assert "may send 2 requests in a minute" in str(clock.refuse(limited, 50))
    running.settle(UsedTokens(10, 0, 0))
    running.give_back()
    clock.refuse(limited, 50)
    clock.now += 60
    clock.enter(limited, 50)


def test_the_number_of_meters_is_bounded() -> None:
    clock = Clock()
    for number in range(MAX_METERS + 10):
        clock.enter(make_caller(f"team/{number}", requests_per_minute=1))
    assert len(clock.meters._meters) == MAX_METERS


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50), st.integers(0, 50)), max_size=60))
def test_no_hour_has_more_tokens_than_its_minutes_and_one_request(requests: list[tuple[float, int, int]]) -> None:
    clock, caller = Clock(), make_caller(tokens_per_minute=100)
    began, used = clock.now, 0
    for pause, prompt, answer in requests:
        clock.now += pause
        try:
            request = clock.enter(caller, prompt)
        except RateLimited:
            continue
        request.settle(UsedTokens(prompt, 0, answer))
        used += prompt + answer
        assert used <= 100 + (clock.now - began) * 100 / 60 + 50 + 1e-6


@pytest.mark.parametrize(
    "text", ["[]", '{"namespaces": {"a": {"requests": 1}}}', '{"owners": {"a": {"tokensPerDay": 0}}}']
)
def test_invalid_limits_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        GIVEN_LIMITS.parse(text)
