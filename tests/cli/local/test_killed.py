"""Whatever is killed: no request is lost while the run lives, and no process is left."""

import concurrent.futures
import os
import signal
from pathlib import Path

import httpx
import pytest
from tests.cli.local.running import Running, build_service, command_of, list_descendants, lives


def test_requests_of_a_killed_engine_wait_for_the_next_one(run: Running) -> None:
    (engine,) = run.engines()
    left = list(list_descendants(engine))
    os.kill(engine, signal.SIGKILL)
    assert run.chat().status_code == 200
    assert "chat-engine-1 failed" in run.output
    run.wait("the end of its processes", lambda: not any(map(lives, left)))
    assert len(run.engines()) == 1


@pytest.mark.slow
def test_no_request_is_lost_while_one_of_two_engines_is_killed(tmp_path: Path, models: Path) -> None:
    with Running(tmp_path, models, build_service(replicas=2)) as running:
        running.wait_ready()
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(running.chat, tokens=200) for _ in range(60)]
            running.wait("begin", lambda: sum(each.done() for each in futures) > 6)
            os.kill(running.engines()[0], signal.SIGKILL)
            assert [each.result().status_code for each in futures] == [200] * 60
        running.wait("second engine", lambda: running.output.count("is ready:") == 3)


def test_nothing_is_left_of_a_killed_run_and_the_next_one_starts_clean(tmp_path: Path, models: Path) -> None:
    with Running(tmp_path, models, build_service()) as running:
        processes = running.wait_ready().descendants()
        assert len(processes) > 3
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        running.wait("the end of all processes", lambda: not any(map(lives, processes)))
    (before,) = tmp_path.glob("cache/run/*")
    with Running(tmp_path, models, build_service(autoscaling={"minReplicas": 0, "maxReplicas": 1})) as again:
        again.wait_ready()
        assert not before.exists()
        again.process.send_signal(signal.SIGINT)
        assert again.wait_ended() == 0


@pytest.mark.slow
def test_a_killed_part_of_an_engine_is_replaced(run: Running) -> None:
    """The engine process, and each process that reads bodies for it."""
    for words in (b"conveyor_engine.loop.process", b"serve"):
        (engine,) = run.engines()
        part = next(pid for pid in list_descendants(engine) if words in command_of(pid))
        os.kill(part, signal.SIGKILL)
        assert run.chat().status_code == 200


@pytest.mark.slow
def test_nothing_is_left_if_the_run_and_an_engine_are_killed_at_once(tmp_path: Path, models: Path) -> None:
    with Running(tmp_path, models, build_service()) as running:
        processes = running.wait_ready().descendants()
        for pid in (*running.engines(), running.process.pid):
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        running.wait("the end of all processes", lambda: not any(map(lives, processes)))


def test_a_second_signal_ends_at_once(run: Running) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(run.chat, tokens=8000, stream=True)
        run.wait("request", lambda: '"in_flight":1' in _read_demand(run) or future.done())
        processes = run.descendants()
        run.terminate()
        run.wait_for("ending: ")
        run.terminate()
        assert run.wait_ended() == 0
        future.exception()
    run.wait("the end of all processes", lambda: not any(map(lives, processes)))


def test_others_reach_the_gateway_and_not_its_admin_port(tmp_path: Path, models: Path) -> None:
    asleep = build_service(autoscaling={"minReplicas": 0, "maxReplicas": 1})
    with Running(tmp_path, models, asleep, flags=("--host", "0.0.0.0")) as running:
        running.wait("the gateway", lambda: _answers(f"http://127.0.0.2:{running.port}/v1/models"))
        port = _find_admin_port(running)
        assert _answers(f"http://127.0.0.1:{port}/demand")
        assert not _answers(f"http://127.0.0.2:{port}/demand")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def _read_demand(run: Running) -> str:
    return run.http.get(f"http://127.0.0.1:{_find_admin_port(run)}/demand").text


def _find_admin_port(run: Running) -> str:
    log = next(run.folder.glob("cache/run/*/gateway.log")).read_text()
    return log.partition("admin_port=")[2].split()[0]
