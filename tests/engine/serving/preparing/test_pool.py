"""Tests that a real server refuses costly bodies and continues with all other requests."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engine.chat_model import CHAT_TEMPLATE, write_chat_model
from tests.engine.processes import IDLE, EngineServer, children, wait_until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HOSTILE = {
    "loop": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "grow": "{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
    "explode": "{{ 'x' * (messages | length * 100000000000) }}",  # a constant would explode where it is compiled
    "explode slowly": "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "hang in one operation": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "divide by zero": "{{ 1 / 0 }}",
    "recurse": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def make_message(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server whose model's template does something bad when it is told to, as on a node of 192 CPUs."""
    folder = tmp_path_factory.mktemp("hostile")
    model = write_chat_model(folder / "model")
    ifs = "".join(
        f"{{% if messages[0].content == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items()
    )
    (model / "chat_template.jinja").write_text(ifs + CHAT_TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYON_NUM_THREADS", "192")  # what tokenizers would use there
        server = EngineServer(folder / "server", model, IDLE, max_num_queued_requests=100)
    with server:
        yield server.wait_ready()


def test_a_tokenizer_on_a_node_of_many_cpus_fits_into_a_job_s_memory(hostile: EngineServer) -> None:
    assert hostile.post(COMPLETION, {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_with_a_reason_and_the_next_chat_goes_on(
    hostile: EngineServer, name: str
) -> None:
    answer = hostile.post(CHAT, make_message(name))
    assert answer.status_code == 400, answer.text
    assert "template" in answer.json()["error"]["message"]
    assert hostile.post(CHAT, make_message("hello")).status_code == 200


@pytest.mark.slow
def test_looping_templates_leave_completions_and_probes_alone(hostile: EngineServer) -> None:
    with ThreadPoolExecutor(6) as threads:
        looping = [threads.submit(hostile.post, CHAT, make_message("loop")) for _ in range(6)]
        answered = [hostile.post(COMPLETION, {"prompt": "a", "max_tokens": 1}).status_code, hostile.load()["running"]]
        assert not all(future.done() for future in looping)
        assert answered == [200, 0]
        assert {future.result().status_code for future in looping} == {400}


@pytest.mark.slow
def test_a_request_waits_for_a_worker_no_longer_than_its_own_time(hostile: EngineServer) -> None:
    with ThreadPoolExecutor(6) as threads:
        looping = [threads.submit(hostile.post, CHAT, make_message("loop")) for _ in range(6)]
        timed = hostile.post(CHAT, make_message("loop"), **{"X-Request-Timeout-Seconds": "0.5"})
        assert timed.status_code == 504
        assert {future.result().status_code for future in looping} == {400}


def test_four_mebibytes_of_wrong_messages_leave_the_others_their_turns(hostile: EngineServer) -> None:
    body = b'{"messages":[' + b",".join([b"1"] * 500_000) + b"]}"
    with ThreadPoolExecutor(4) as threads:
        wrong = [threads.submit(hostile.post, CHAT, body) for _ in range(4)]
        assert hostile.post(CHAT, make_message("hello")).status_code == 200
        assert {future.result().status_code for future in wrong} == {400}


def test_idle_workers_that_are_killed_are_replaced_and_no_request_is_refused(hostile: EngineServer) -> None:
    fork_server = children(hostile.process.pid)[0]
    workers = children(fork_server)
    for pid in workers:
        os.kill(pid, 9)
    wait_until(lambda: len(set(children(fork_server)) - set(workers)) == len(workers), "new workers", hostile)
    answers = [hostile.post(CHAT, make_message("hello")).status_code for _ in range(2 * len(workers))]
    assert set(answers) == {200}


@pytest.mark.slow
def test_workers_that_are_stopped_are_replaced_and_their_requests_may_be_sent_again(hostile: EngineServer) -> None:
    fork_server = children(hostile.process.pid)[0]
    workers = children(fork_server)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(len(workers)) as threads:
        futures = [threads.submit(hostile.post, COMPLETION, {"prompt": "a", "max_tokens": 1}) for _ in workers]
        answers = [future.result() for future in futures]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(503, "unavailable")}
    assert hostile.post(COMPLETION, {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert not set(workers) & set(children(fork_server))
    assert hostile.get("/livez").status_code == 200
