"""One service of one engine: URLs, clients, the kept files, and the order of the end."""

import json
import subprocess
import threading

import anthropic
import openai
from tests.cli.local.running import Running, lives, read_page, read_stream


def test_the_urls_are_those_of_a_cluster(run: Running) -> None:
    for path in ("/default/chat/v1", "/v1"):
        answer = run.chat(path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert [model["id"] for model in run.http.get("/v1/models").json()["data"]] == ["chat"]


def test_the_page_s_call_is_answered(run: Running) -> None:
    """The page is docs/local.md."""
    call = read_page("curl").replace("http://127.0.0.1:8000", run.root).replace("/qwen/", "/chat/")
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout)["object"] == "chat.completion"


def test_openai_s_client_streams(run: Running) -> None:
    client = openai.OpenAI(base_url=f"{run.root}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        extra_body={"ignore_eos": True},
        stream=True,
        stream_options={"include_usage": True},
    )
    assert [chunk.usage.completion_tokens for chunk in stream if chunk.usage] == [8]


def test_anthropic_s_client_is_answered(run: Running) -> None:
    client = anthropic.Anthropic(base_url=f"{run.root}/default/chat", api_key="none")
    message = client.messages.create(model="chat", max_tokens=8, messages=[{"role": "user", "content": "Hello"}])
    assert message.role == "assistant"
    assert 1 <= message.usage.output_tokens <= 8


def test_each_part_of_the_start_is_reported(run: Running) -> None:
    (line,) = [line for line in run.output.splitlines() if "chat-engine-1 is ready" in line]
    assert all(f" {part} " in line for part in ("fetch", "load", "warm up"))
    assert f"curl {run.root}/default/chat/v1/chat/completions" in run.output


def test_an_engine_has_this_machine_s_settings_only_as_flags(run: Running) -> None:
    (log,) = run.folder.glob("cache/run/*/default/chat-engine-1/engine.log")
    assert "host=127.0.0.1" in log.read_text()
    (config,) = run.folder.glob("cache/run/*/default/config-maps/*/engine.yaml")
    assert "model: /models/pvc/chat" in config.read_text()
    assert "port: 8000" in config.read_text()


def test_sigterm_drains_as_a_pod_does(run: Running) -> None:
    """This is the last test of the run that they share."""
    processes = run.descendants()
    answers: list[str] = []
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    begun = threading.Event()

    def send() -> None:
        with run.http.stream("POST", "/default/chat/v1/completions", json=body) as answer:
            begun.set()
            answers.append("".join(answer.iter_text()))

    thread = threading.Thread(target=send)
    thread.start()
    assert begun.wait(60)
    run.terminate()
    assert run.wait_ended() == 0
    thread.join()
    assert read_stream(answers[0])[-1]["choices"][0]["finish_reason"] == "length"
    assert run.output.endswith("ended\n")
    run.wait("the end of all processes", lambda: not any(map(lives, processes)))
