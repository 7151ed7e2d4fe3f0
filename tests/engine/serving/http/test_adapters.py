"""Tests that a request's `model` selects a LoRA adapter, on a real server with OpenAI's and Anthropic's clients."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI
from tests.engine.lora import load, save_adapter
from tests.engine.processes import EngineServer, wait_until
from tests.engine.tiny_models import greedy

Adapted = tuple[EngineServer, list[list[int]]]
PROMPT = list(range(40, 60))
TOKENS = 12
CHAT = [{"role": "user", "content": "Tell me."}]
NAMES = ["tiny", "tiny:sql", "tiny:fr"]


@pytest.fixture(scope="module")
def adapted(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """A server with two adapters, and the tokens after PROMPT by each of NAMES, from transformers and PEFT."""
    folder = tmp_path_factory.mktemp("adapted")
    models = [load(chat_model), *(save_adapter(chat_model, folder / name, len(name)) for name in ("sql", "fr"))]
    answers = [greedy(model, PROMPT, TOKENS) for model in models]
    sources = ",".join(f"{name}={folder / name}" for name in ("sql", "fr"))
    with EngineServer(folder / "server", chat_model, adapters=sources, max_num_seqs=4) as server:
        yield server.wait_ready(), answers


@pytest.fixture(scope="module")
def openai(adapted: Adapted) -> OpenAI:
    return OpenAI(base_url=f"{adapted[0].url}/v1", api_key="none", max_retries=0)


def test_the_models_are_listed_with_what_they_belong_to(openai: OpenAI) -> None:
    listed = [model.model_dump() for model in openai.models.list()]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("tiny", None), ("tiny:sql", "tiny"), ("tiny:fr", "tiny"),
    ]  # fmt: skip
    assert [Path(model["root"]).name for model in listed] == ["tiny", "sql", "fr"]
    assert openai.models.retrieve("tiny:fr").model_dump() == listed[2]


def test_the_answer_is_that_of_peft_and_has_the_requested_name(openai: OpenAI, adapted: Adapted) -> None:
    with_ids = {"return_token_ids": True}
    for name, token_ids in zip(NAMES, adapted[1], strict=True):
        answer = openai.completions.create(
            model=name, prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body=with_ids
        )
        assert (answer.model, answer.choices[0].model_extra["token_ids"]) == (name, token_ids)
    assert len(set(map(tuple, adapted[1]))) == 3


def test_the_own_name_of_an_adapter_selects_it_too(openai: OpenAI, adapted: Adapted) -> None:
    answer = openai.completions.create(
        model="fr", prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"return_token_ids": True}
    )
    assert (answer.model, answer.choices[0].model_extra["token_ids"]) == ("tiny:fr", adapted[1][2])


def test_chats_streams_responses_and_messages_select_it_alike(openai: OpenAI, adapted: Adapted) -> None:
    anthropic = Anthropic(base_url=adapted[0].url, api_key="none", max_retries=0)
    answers = {}
    for name in NAMES:
        chat = openai.chat.completions.create(model=name, messages=CHAT, max_tokens=TOKENS, temperature=0)
        answers[name] = chat.choices[0].message.content
        stream = openai.chat.completions.create(
            model=name, messages=CHAT, max_tokens=TOKENS, temperature=0, stream=True
        )
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answers[name]
        response = openai.responses.create(model=name, input="Tell me.", max_output_tokens=TOKENS, temperature=0)
        assert (response.model, response.output_text) == (name, answers[name])
        message = anthropic.messages.create(model=name, messages=CHAT, max_tokens=TOKENS, extra_body={"temperature": 0})
        assert (message.model, message.content[0].text) == (name, answers[name])
    assert len(set(answers.values())) == 3


def test_requests_and_tokens_are_counted_for_each_adapter(openai: OpenAI, adapted: Adapted) -> None:
    server = adapted[0]

    def counted() -> list[float]:
        names = [f"conveyor_engine_adapter_{what}_total" for what in ("requests", "prompt_tokens", "generation_tokens")]
        return [server.metric(name, adapter=adapter) for adapter in ("sql", "fr") for name in names]

    before = counted()
    for name in NAMES:
        openai.completions.create(model=name, prompt=[PROMPT, PROMPT], n=2, max_tokens=3, temperature=0)
    with pytest.raises(NotFoundError):
        openai.completions.create(model="tiny:de", prompt=PROMPT)
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 40, 12] * 2
    stream = openai.completions.create(model="tiny:fr", prompt=PROMPT, max_tokens=64, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: counted()[3] == before[3] + 2, "an answer whose client has left is counted", server)


@pytest.mark.parametrize("name", ["SQL", "tiny:", "tiny:SQL", "tiny:sql:fr", ":sql", "other:sql"])
def test_another_name_is_refused_with_those_that_there_are(adapted: Adapted, name: str) -> None:
    answer = adapted[0].post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "these are: tiny, tiny:sql, tiny:fr" in answer.json()["error"]["message"]


def test_without_a_model_the_base_answers(adapted: Adapted) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    answer = adapted[0].post("/v1/completions", body).json()
    assert (answer["model"], answer["choices"][0]["token_ids"]) == ("tiny", adapted[1][0])


def test_an_adapter_that_cannot_be_used_ends_the_start_with_its_name(chat_model: Path, tmp_path: Path) -> None:
    save_adapter(chat_model, tmp_path / "sql", 1)
    config = tmp_path / "sql" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with EngineServer(tmp_path / "server", chat_model, adapters=f"sql={tmp_path / 'sql'}") as server:
        assert server.wait_exit() == 1
    ended = server.termination()
    assert ended["reason"] == "UnsupportedModel"
    assert "the adapter 'sql' cannot be used: " in ended["message"]
    assert "'use_dora', which this engine does not compute" in ended["message"]
