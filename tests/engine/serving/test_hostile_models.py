"""Model folders whose tokenizer or template is hostile, behind whole processes: a sentence, in bounded memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.chat_model import CHAT_TEMPLATE
from tests.engine.processes import IDLE, REAL, EngineServer

pytestmark = pytest.mark.slow
API_MIB_MAX = 400  # of the API process: a folded template took 5 GiB
BACKTRACKS = {"Regex": "^(.|.|.|.|.|.|..)*$x"}
CHAT = {"messages": [{"role": "user", "content": "the quick brown fox jumps"}], "max_tokens": 30, "ignore_eos": True}
TEXT = {"prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": 30, "ignore_eos": True}
IDS = {"prompt": [5] * 30, "max_tokens": 3, "ignore_eos": True}
COSTLY = (400, "prompt_too_costly")
Content = dict[str, Any]


def replace_in_decoder(tokenizer: Content) -> None:
    replace = {"type": "Replace", "pattern": BACKTRACKS, "content": "-"}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], replace]}


def split_in_pre_tokenizer(tokenizer: Content) -> None:
    split = {"type": "Split", "pattern": BACKTRACKS, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}


def replace_in_normalizer(tokenizer: Content) -> None:
    tokenizer["normalizer"] = {"type": "Replace", "pattern": BACKTRACKS, "content": "-"}


def name_a_byte_that_is_none(tokenizer: Content) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    for piece in [piece for piece, number in vocabulary.items() if number == 383]:
        del vocabulary[piece]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": 383, "content": "<0xZZ>", **flags})
    tokenizer |= {"decoder": {"type": "ByteFallback"}, "pre_tokenizer": None}
    tokenizer["model"]["merges"] = []


def edited(chat_model: Path, folder: Path, edit: Callable[[Content], None], template: str = CHAT_TEMPLATE) -> Path:
    shutil.copytree(chat_model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def peak_mib(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) // 1024


def answer(server: EngineServer, path: str, body: Content) -> tuple[int, str | None]:
    """The status, and the code of the error."""
    response = server.post(path, body)
    content = response.json()
    return response.status_code, content.get("error", {}).get("code")


@pytest.mark.parametrize(
    ("edit", "template", "chat", "text"),
    [
        (lambda _: None, "{{ 'a' * 3000000000 }}", COSTLY, (200, None)),
        (replace_in_decoder, CHAT_TEMPLATE, (500, "generation_failed"), (500, "generation_failed")),
        (split_in_pre_tokenizer, CHAT_TEMPLATE, COSTLY, COSTLY),
        (replace_in_normalizer, CHAT_TEMPLATE, COSTLY, COSTLY),
    ],
    ids=["folded template", "decoder", "pre-tokenizer", "normalizer"],
)
def test_what_a_hostile_model_cannot_answer_is_an_error_and_it_serves_the_rest(
    chat_model: Path, tmp_path: Path, edit: Any, template: str, chat: tuple[int, str], text: tuple[int, str | None]
) -> None:
    with EngineServer(tmp_path / "server", edited(chat_model, tmp_path / "model", edit, template), IDLE) as server:
        server.wait_ready()
        assert answer(server, "/v1/chat/completions", CHAT) == chat
        assert answer(server, "/v1/completions", TEXT) == text
        assert answer(server, "/v1/completions", IDS) == (200, None)
        assert server.get("/livez").status_code == 200
        assert peak_mib(server.process.pid) < API_MIB_MAX


def test_a_template_without_end_ends_the_start_with_a_sentence(chat_model: Path, tmp_path: Path) -> None:
    model = edited(chat_model, tmp_path / "model", lambda _: None, "{{ 7 ** (7 ** 9) }}")
    with EngineServer(tmp_path / "server", model, IDLE) as server:
        assert server.wait_exit() == 1
        termination = server.termination()
    assert termination["reason"] == "UnsupportedModel"
    assert termination["message"].startswith("the model's chat template takes more than 5 s of CPU time")


def test_a_token_that_is_no_byte_is_shown_as_its_name(chat_model: Path, tmp_path: Path) -> None:
    """With log probabilities it had cut the connection."""
    model = edited(chat_model, tmp_path / "model", name_a_byte_that_is_none)
    body = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "temperature": 2, "seed": 1}
    with EngineServer(tmp_path / "server", model, REAL) as server:
        response = server.wait_ready().post("/v1/completions", body)
    assert response.status_code == 200
    assert any("<0xZZ>" in each for each in response.json()["choices"][0]["logprobs"]["top_logprobs"])
