"""What all gateways say together of the services that may go to zero."""

from conveyor_operator.activity.answer import Activity
from conveyor_operator.activity.follower import Page, sum_activity


def page(waiting: str = "", idle: str = "") -> Page:
    return Page(services=9, waiting=frozenset(waiting.split()), idle=frozenset(idle.split()))


def test_one_gateway_that_holds_requests_is_enough() -> None:
    assert sum_activity([page(), page(waiting="a/b")]) == {"a/b": Activity.WAITING}
    assert sum_activity([None, page(waiting="a/b")]) == {"a/b": Activity.WAITING}


def test_a_service_is_idle_when_all_gateways_say_so() -> None:
    assert sum_activity([page(idle="a/b a/c"), page(idle="a/b")]) == {"a/b": Activity.IDLE}
    assert sum_activity([page(idle="a/b"), page()]) == {}


def test_a_gateway_that_says_nothing_may_have_requests() -> None:
    assert sum_activity([page(idle="a/b"), None]) == {}


def test_requests_at_one_gateway_outweigh_the_idleness_at_others() -> None:
    """Each has its own view of the engines for a moment."""
    assert sum_activity([page(idle="a/b", waiting="a/b"), page(idle="a/b")]) == {"a/b": Activity.WAITING}


def test_without_gateways_nothing_is_known() -> None:
    assert sum_activity([]) == {}
