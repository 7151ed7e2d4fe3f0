"""Tests how bodies become engine requests, without processes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_facts
from tests.engine.chat_model import write_tokenizer

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import ServedModel, find_kind
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.frames import FrameReader
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.worker import Job


def prepared(chat_model: Path, kind: str, level: int | None = None, **fields: Any) -> PreparedText:
    model = ServedModel("tiny", Tokenizer(chat_model), SamplingDefaults())
    content = {"prompt": "a"} if kind == "completion" else {"messages": [{"role": "user", "content": "a"}]}
    facts = make_facts(max_model_len=131_072, vocab_size=384)
    return prepare(model, Job(kind, facts, 1000, 0.0, json.dumps({**content, **fields}).encode(), level, 600.0))


def prepare(model: ServedModel, job: Job) -> Any:
    return find_kind(job).prepare(model, job)


SKIPS = """{% for message in messages %}{% if message.role in ('user', 'ipython') %}
{{- message.role + ': ' + message.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("text", ["a", "", " "])
def test_a_role_that_the_template_skips_is_refused(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SKIPS)
    user = {"role": "user", "content": "a"}
    for skipped in ("User", "assistent"):
        with pytest.raises(InvalidRequest, match=f"shows no message with the role '{skipped}'") as caught:
            prepared(tmp_path, "chat", messages=[user, {"role": skipped, "content": text}])
        assert caught.value.param == "messages"
    for shown in ("ipython", "system"):
        assert prepared(tmp_path, "chat", messages=[user, {"role": shown, "content": text}])


def read_add(one: PreparedText) -> Add:
    (payload,) = FrameReader().feed(one.parts[0].add)
    add = to_engine_decoder.decode(payload)
    assert isinstance(add, Add)
    return add


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_level_is_the_clients_priority_unless_a_gateway_has_given_one(chat_model: Path, kind: str) -> None:
    assert read_add(prepared(chat_model, kind)).level == 0
    assert read_add(prepared(chat_model, kind, priority=7)).level == 7
    assert read_add(prepared(chat_model, kind, level=9, priority=7)).level == 9
    assert read_add(prepared(chat_model, kind, level=0, priority=7)).level == 0
    assert read_add(prepared(chat_model, kind)).deadline == 600.0


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("completion", {"n": 128, "max_tokens": 8000, "logprobs": 20}),
        ("chat", {"n": 128, "max_tokens": 8000, "logprobs": True, "top_logprobs": 20}),
        ("chat", {"n": 2, "logprobs": True, "top_logprobs": 20}),
        ("completion", {"prompt": ["a"] * 500, "max_tokens": 10_000, "logprobs": 0}),
    ],
)
def test_more_log_probabilities_than_are_kept_are_refused(chat_model: Path, kind: str, fields: dict[str, Any]) -> None:
    """Before, they took 8 GiB, and minutes in the event loop that serves all streams."""
    with pytest.raises(InvalidRequest, match="more than 4000000") as caught:
        prepared(chat_model, kind, **fields)
    assert caught.value.param == "logprobs"


def test_a_whole_context_of_log_probabilities_is_taken(chat_model: Path) -> None:
    assert len(prepared(chat_model, "chat", logprobs=True, top_logprobs=20).choices) == 1


def test_the_prompt_stays_in_the_message_for_the_engine(chat_model: Path) -> None:
    one = prepared(chat_model, "completion", prompt=[7] * 100_000, n=64)
    assert (one.num_prompt_tokens, len(one.choices), one.choices[63].prompt_tail) == (100_000, 64, [7] * 6)
    assert len(one.parts[0].add) < 420_000


def test_a_prompt_is_cut_at_its_beginning_to_what_the_answer_leaves(chat_model: Path) -> None:
    prompt = list(range(2, 300)) * 500
    one = prepared(chat_model, "completion", prompt=prompt, truncate_prompt_tokens=-1, max_tokens=1000)
    assert (one.num_prompt_tokens, one.choices[0].prompt_tail) == (131_072 - 1000, prompt[-6:])
    other = prepared(chat_model, "completion", prompt=prompt, truncate_prompt_tokens=7, truncation_side="right")
    assert (other.num_prompt_tokens, other.choices[0].prompt_tail) == (7, prompt[1:7])
    chat = prepared(chat_model, "chat", messages=[{"role": "user", "content": "a b" * 99}], truncate_prompt_tokens=9)
    assert (chat.num_prompt_tokens, chat.choices[0].prompt_tail[-1]) == (9, 2)  # the assistant's turn


def test_a_prompt_cannot_be_cut_to_more_than_the_answer_leaves(chat_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be at most 130072") as caught:
        prepared(chat_model, "completion", truncate_prompt_tokens=130_073, max_tokens=1000)
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequest, match="maximum context length is 131072 tokens") as caught:
        prepared(chat_model, "completion", truncate_prompt_tokens=-1, max_tokens=200_000)
    assert caught.value.param == "max_tokens"


def params_of(one: PreparedText) -> SamplingParams:
    params = read_add(one).prompts[0].choices[0][1]
    assert params is not None
    return params


def test_bad_words_are_tokens_at_the_beginning_of_a_text_and_within_one(chat_model: Path) -> None:
    """As vLLM reads them: with a space before it a word counts too if that is one token for another."""
    read = params_of(prepared(chat_model, "completion", bad_words=["fox", " the"])).bad_words
    encode = Tokenizer(chat_model).encode
    for word in ("fox", "the"):
        assert tuple(encode(word, 99, add_special_tokens=False)) in read
    with pytest.raises(InvalidRequest, match="must have 1 to 16 tokens") as caught:
        prepared(chat_model, "completion", bad_words=["z" * 200])
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {"384": 1}}, "logit_bias"),
        ({"allowed_token_ids": [384]}, "allowed_token_ids"),
        ({"stop_token_ids": [384]}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_tokens_that_the_model_does_not_have_are_refused(
    chat_model: Path, kind: str, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match="has the token id 384, but the model has 384 tokens, 0 to 383") as caught:
        prepared(chat_model, kind, **fields)
    assert caught.value.param == field


def test_what_chooses_tokens_reaches_the_engine(chat_model: Path) -> None:
    numbers = {"min_p": 0.2, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1}
    params = params_of(prepared(chat_model, "chat", **numbers, logit_bias={"7": -3, "9": 1.5}, allowed_token_ids=[4.0]))
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert (params.logit_bias, params.allowed_token_ids) == (((7, -3.0), (9, 1.5)), (4,))


MIB = 2**20
USER = '{"role":"user","content":"hi"}'


def read_in_a_child(model: ServedModel, kind: str, body: bytes) -> int:
    """How many bytes a process grows by, at most, that refuses the body."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before = peak_bytes()
        try:
            prepare(model, Job(kind, make_facts(max_model_len=8_192, vocab_size=384), 256, 0.0, body))
        except InvalidRequest:
            os.write(writer, str(peak_bytes() - before).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        return int(pipe.read())


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "begin", "item", "most"),
    [
        ("completion", '{"prompt":[', "[1]", 32),
        ("completion", '{"prompt":[', "1", 16),
        ("completion", '{"stop_token_ids":[', "[]", 32),
        ("completion", '{"bad_words":[', '"a"', 32),
        ("chat", '{"messages":[', USER, 20),
        ("chat", '{"messages":[', "{}", 32),
    ],
)
def test_a_body_takes_few_bytes_for_each_of_its_own(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, begin: str, item: str, most: int
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    model = ServedModel("tiny", Tokenizer(chat_model), SamplingDefaults())
    body = f"{begin}{','.join([item] * (2 * MIB // (len(item) + 1)))}]}}".encode()
    assert read_in_a_child(model, kind, body) / len(body) < most
