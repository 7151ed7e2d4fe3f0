"""Tests that the clients of a class share its places by tokens, whoever sends more or longer requests."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.admission.queues import FAR, make_queue
from tests.gateway.admission.test_queue_classes import BATCH, CHAT, VirtualTime
from tests.lines_run import count_lines

from conveyor_gateway.admission.kept_places import BEYOND_PEAK, MAX_RECENT, RECENT_SECONDS, KeptPlaces
from conveyor_gateway.admission.served_tokens import MAX_DEBT_TOKENS, MAX_IDLE, Level, weigh
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import ONE_TOKEN, Ticket, TicketState, Work
from conveyor_gateway.errors import QueueFull


def admit(queue: ServiceQueue, client: str, prompt: int = 10, answer: int = 0) -> Ticket:
    return queue.admit(FAR, client=client, work=Work(prompt, answer))


def finish_one(run: VirtualTime, used: Work | None = None) -> Ticket:
    """End the request that runs. Return the one that gets its place."""
    run.now += 1
    (ticket,) = run.running
    run.queue.finish(ticket, used)
    (ticket,) = run.running
    return ticket


def test_clients_take_turns_by_tokens_and_not_by_requests() -> None:
    with VirtualTime(place_limit=1) as run:
        admit(run.queue, "first")
        for _ in range(30):
            admit(run.queue, "long", prompt=1000)
        for _ in range(30):
            admit(run.queue, "short", prompt=100)
        clients = Counter(finish_one(run).client for _ in range(22))
    assert clients == {"long": 2, "short": 20}


def test_a_flood_that_came_before_delays_another_client_by_one_request() -> None:
    with VirtualTime(place_limit=1) as run:
        for _ in range(100):
            admit(run.queue, "flood", prompt=1000)
        admit(run.queue, "chat")
        assert finish_one(run).client == "chat"


def test_without_clients_requests_go_in_the_order_of_their_arrival() -> None:
    with VirtualTime(place_limit=1) as run:
        tickets = [admit(run.queue, "", prompt) for prompt in (5000, 1, 700, 1, 90)]
        assert [finish_one(run) for _ in tickets[1:]] == tickets[1:]


def test_a_client_that_returns_has_not_saved_up_turns() -> None:
    with VirtualTime(place_limit=1) as run:
        for _ in range(200):
            admit(run.queue, "steady", prompt=100)
        for _ in range(100):
            finish_one(run)
        for _ in range(50):
            admit(run.queue, "back", prompt=100)
        clients = Counter(finish_one(run).client for _ in range(40))
    assert clients == {"steady": 20, "back": 20}


def test_an_answer_of_unknown_length_counts_as_its_clients_answers_did_and_is_corrected_at_its_end() -> None:
    with VirtualTime(place_limit=1) as run:
        admit(run.queue, "long", prompt=0, answer=10_000)
        for _ in range(60):
            admit(run.queue, "long", prompt=0, answer=10_000)
            admit(run.queue, "short", prompt=0, answer=10_000)
        served = Counter[str]()
        for _ in range(60):
            (ticket,) = run.running
            answer = 4000 if ticket.client == "long" else 100
            served[ticket.client] += answer
            finish_one(run, Work(0, answer))
    assert abs(served["long"] - served["short"]) <= 2 * 4000, served


def test_what_a_client_used_alone_is_not_held_against_it() -> None:
    with VirtualTime(place_limit=64) as run:
        alone = [admit(run.queue, "a", prompt=10, answer=10_000) for _ in range(64)]
        for each in alone:
            run.queue.finish(each, Work(10, 8192))
        running = [admit(run.queue, "b", prompt=10) for _ in range(64)]
        waiting = admit(run.queue, "a", prompt=10)
        for _ in range(50):
            admit(run.queue, "b", prompt=10)
        for each in running[:4]:
            run.queue.finish(each, Work(10))
        assert waiting.state is TicketState.DISPATCHED


def test_what_a_client_used_beside_one_with_few_requests_delays_it_only_for_a_while() -> None:
    with VirtualTime(place_limit=64) as run:
        beside = admit(run.queue, "b", prompt=1)
        heavy = [admit(run.queue, "a", prompt=10, answer=10_000) for _ in range(60)]
        for each in heavy:
            run.queue.finish(each, Work(10, 8192))
        running = [beside, *(admit(run.queue, "c", prompt=1) for _ in range(63))]
        waiting = admit(run.queue, "a", prompt=1000)
        for _ in range(300):
            admit(run.queue, "b", prompt=1000)
        num_before = 0
        while waiting.state is TicketState.QUEUED:
            run.queue.finish(running.pop(0))
            (begun,) = run.running - set(running)
            running.append(begun)
            num_before += begun.client == "b"
        assert MAX_DEBT_TOKENS / 1000 - 2 <= num_before <= MAX_DEBT_TOKENS / 1000 + 2


HISTORIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 500), st.integers(0, 300), st.integers(0, 300)), max_size=60
)


@given(HISTORIES, st.integers(1, 4))
def test_clients_that_always_wait_get_the_same_tokens_up_to_their_largest_requests(
    requests: list[tuple[str, int, int, int]], places: int
) -> None:
    """The theorem of the paper: without idle times, the difference is bounded, whatever happens before."""
    with VirtualTime(place_limit=places) as run:
        used = dict[int, Work]()
        for client, prompt, most, answer in requests:
            used[admit(run.queue, client, prompt, most).number] = Work(prompt, min(answer, most))
        for _ in range(150):
            for client in "xy":
                used[admit(run.queue, client, 500, 300).number] = Work(500, 300 if client == "x" else 0)
        served, largest = Counter[str](), weigh(500, 300)
        while run.queue.queued > 40 and run.running:
            ticket = min(run.running, key=lambda each: each.number)
            if ticket.client in "xy":
                served[ticket.client] += weigh(used[ticket.number].prompt_tokens, used[ticket.number].answer_tokens)
            waiting = {each.client for each in run.queue._waiting}
            if not waiting >= {"x", "y"}:
                break
            run.queue.finish(ticket, used[ticket.number])
        assert abs(served["x"] - served["y"]) <= 2 * (places + 1) * largest


def test_a_rejected_attempt_is_not_charged() -> None:
    with VirtualTime(place_limit=1) as run:
        rejected = admit(run.queue, "rejected", prompt=1000)
        admit(run.queue, "other", prompt=10)
        run.queue.requeue(rejected)
        assert run.running == {rejected}


def test_a_fairer_turn_never_overtakes_a_more_urgent_class() -> None:
    with VirtualTime(CHAT, BATCH, place_limit=1) as run:
        for _ in range(2):
            run.queue.admit(FAR, CHAT, client="chatty", work=Work(10_000))
        run.queue.admit(FAR, BATCH, client="new")
        assert finish_one(run).request_class is CHAT


def test_the_number_of_counters_is_bounded_though_each_client_is_above_the_others() -> None:
    level = Level()
    for number in range(3 * MAX_IDLE):
        ticket = Ticket(number, 0.0, FAR, client=f"10.0.{number >> 8}.{number & 255}", work=Work(number + 1))
        level.begin(ticket, waits=False)
        level.end(ticket, None)
    assert len(level._accounts) <= MAX_IDLE + 1
    assert len(level._idle) <= MAX_IDLE + 1


async def test_in_a_full_queue_the_client_with_most_requests_loses_its_last_one() -> None:
    queue = make_queue(max_queued_requests=4)
    flood = [admit(queue, "flood") for _ in range(4)]
    with pytest.raises(QueueFull):
        admit(queue, "flood")
    chat = admit(queue, "chat")
    assert [each.state for each in (*flood, chat)] == [TicketState.QUEUED] * 3 + [
        TicketState.CLOSED,
        TicketState.QUEUED,
    ]
    with pytest.raises(QueueFull):
        await queue.wait_for_engine(flood[3])


def test_the_last_places_are_kept_for_others_only_while_there_are_others() -> None:
    with VirtualTime(place_limit=24, num_beyond=2) as run:
        flood = [admit(run.queue, "flood") for _ in range(40)]
        assert run.queue.dispatched == 24, "it is alone"
        chat = admit(run.queue, "chat", prompt=1000)
        for each in flood[:4]:
            run.queue.finish(each)
        assert (chat.state, run.queue.dispatched) == (TicketState.DISPATCHED, 22)
        more = [admit(run.queue, "chat") for _ in range(3)]
        assert [each.state is TicketState.DISPATCHED for each in more] == [True, True, False]
        run.queue.finish(chat)
        assert more[2].state is TicketState.DISPATCHED, "though the flood has been served less"


@pytest.mark.parametrize(("num_others", "num_kept"), [(0, 0), (1, 1), (2, 1), (3, 2), (6, 3), (7, 4), (30, 4)])
def test_one_place_is_kept_for_two_others_up_to_a_limit(num_others: int, num_kept: int) -> None:
    with VirtualTime(place_limit=24, most_kept=4) as run:
        for _ in range(3):  # a client that sends more counts once
            for number in range(num_others):
                run.queue.finish(admit(run.queue, f"chat-{number}"), ONE_TOKEN)
        for _ in range(40):
            admit(run.queue, "flood")
        assert run.queue.dispatched == 24 - num_kept
        run.now += RECENT_SECONDS
        run.queue._dispatcher.match()
        assert run.queue.dispatched == 24


@pytest.mark.parametrize("used", [None, Work(0)])
def test_no_place_is_kept_for_clients_whose_requests_use_no_tokens(used: Work | None) -> None:
    with VirtualTime(place_limit=24, most_kept=4) as run:
        for number in range(30):
            run.queue.finish(admit(run.queue, f"invalid-{number}"), used)
        for _ in range(40):
            admit(run.queue, "flood")
        assert run.queue.dispatched == 24


def test_the_number_of_remembered_clients_is_bounded() -> None:
    kept = KeptPlaces()
    for number in range(2 * MAX_RECENT):
        kept.enter(f"client-{number}", 100, 0.0)
    assert kept.count("flood", 1.0) == MAX_RECENT // 2
    assert kept.count("flood", RECENT_SECONDS) == 0


def test_the_end_of_the_time_for_others_wakes_who_waits() -> None:
    with VirtualTime(place_limit=4, num_beyond=1) as run:
        run.queue.finish(admit(run.queue, "chat"), ONE_TOKEN)
        for _ in range(5):
            admit(run.queue, "flood")
        assert run.queue.dispatched == 3
        run.now += RECENT_SECONDS + 1
        run.loop.call_soon(run.loop.call_later, 0.0, run.loop.stop)
        run.loop.run_forever()
        assert run.queue.dispatched == 4


def test_two_floods_use_all_places_once_nobody_else_is_there() -> None:
    with VirtualTime(place_limit=8, num_beyond=2) as run:
        for _ in range(10):
            for client in "ab":
                admit(run.queue, client)
        assert run.queue.dispatched == 6
        run.now += RECENT_SECONDS + 1
        run.queue._dispatcher.match()
        assert run.queue.dispatched == 8


def test_few_clients_have_many_places_and_an_event_stays_cheap_after_most_engines_have_left() -> None:
    def count(num_clients: int) -> int:
        with VirtualTime(place_limit=12, num_beyond=1) as run:
            run.queue.set_engines([f"a:{number}" for number in range(num_clients // 6)])
            begun = [admit(run.queue, f"client-{number // 2}") for number in range(2 * num_clients)]
            on_it = next(each for each in begun if each.bound_engine.address == "a:1")
            for number in range(num_clients):
                if f"client-{number}" != on_it.client:
                    admit(run.queue, f"client-{number}")
            run.queue.set_engines(["a:1"])
            assert run.queue.queued == num_clients - 1
            return count_lines(lambda: run.queue.finish(on_it), "/conveyor_gateway/admission/")

    assert count(240) < 3 * count(24)


def test_a_single_place_is_never_kept() -> None:
    with VirtualTime(place_limit=2, num_beyond=2) as run:
        for client in "abab":
            admit(run.queue, client)
        assert run.queue.dispatched == 2


def test_clients_of_which_few_run_at_once_have_few_places_kept() -> None:
    kept, now = KeptPlaces(), 0.0
    for _ in range(3):
        for number in range(102):  # a short request of each in 30 seconds, two at once
            now += RECENT_SECONDS / 102
            kept.enter(f"client-{number}", 256, now)
            kept.leave(f"client-{number - 1}")
            if not number:
                kept.leave("client-101")
    assert kept.count("flood", now) <= 2 + BEYOND_PEAK
    for number in range(20):  # then a burst
        kept.enter(f"client-{number}", 256, now)
    assert kept.count("flood", now) >= 20
    for _ in range(2):
        now += RECENT_SECONDS
        kept.enter("client-0", 256, now)
    assert kept.count("flood", now) == 1


def test_a_client_that_gets_many_places_counts_for_the_peak_only_until_it_has_them() -> None:
    kept = KeptPlaces()
    for number in range(200):
        kept.enter("flood", 256, 0.0)
        kept.enter(f"client-{number}", 256, 0.0)
        kept.leave(f"client-{number}")
    for _ in range(200):
        kept.leave("flood")
    assert (kept._total_few, kept._num_few, kept._num_of_client) == (0, {}, {})
