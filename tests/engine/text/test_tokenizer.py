import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.chat_model import ASSISTANT, END, USER, VOCABULARY, write_tokenizer
from tests.engine.processes import environment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from conveyor_engine.errors import GenerationFailed, InvalidRequest, ModelError
from conveyor_engine.text.chat_template import RENDERING, Rendering
from conveyor_engine.text.tokenizer import Tokenizer, Truncation, read_chat_template

TEXT = "naïve café 🙂 — 日本語 the fox\n\tdef f(x):"
MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "é"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> str:
    stream = tokenizer.decode_stream(prompt or [])
    return "".join(stream.push(i) for i in ids)


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    max_tokens: int,
    variables: dict[str, Any] | None = None,
    rendering: Rendering = RENDERING,
) -> list[int]:
    text = tokenizer.render_chat(messages, max_tokens, variables, rendering)
    return tokenizer.encode(text, max_tokens, add_special_tokens=False, param="messages")


def test_ids_are_those_of_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    assert tokenizer.encode(TEXT, 1000) == theirs(TEXT)["input_ids"]
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encode_chat(tokenizer, MESSAGES, 1000) == chat
    begun = [*MESSAGES, {"role": "assistant", "content": "The "}]
    for messages in (MESSAGES, begun):
        continued = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=True)["input_ids"]
        rendering = Rendering(add_generation_prompt=False, continue_final_message=True)
        assert encode_chat(tokenizer, messages, 1000, rendering=rendering) == continued
    alone = theirs.apply_chat_template(MESSAGES, add_generation_prompt=False, return_dict=True)["input_ids"]
    assert encode_chat(tokenizer, MESSAGES, 1000, rendering=Rendering(add_generation_prompt=False)) == alone


def test_a_template_that_trims_messages_is_continued_where_it_ends(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    template = (
        "{{ documents | map(attribute='text') | join(',') }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    made = Tokenizer(tmp_path)
    rendering = Rendering(False, True, [{"text": "a"}, {"text": "b"}])
    messages = [{"role": "user", "content": " x "}, {"role": "assistant", "content": " so "}]
    assert encode_chat(made, messages, 100, rendering=rendering) == made.encode("a,b[x][so", 100)
    (tmp_path / "chat_template.jinja").write_text("nothing")
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        encode_chat(Tokenizer(tmp_path), messages, 100, rendering=rendering)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", [TEXT, TEXT * 400, "the " * 3000, "\n" * 9000], ids=["short", "long", "words", "one"])
def test_truncated_ids_are_those_of_transformers(directory: Path, tmp_path: Path, side: Any, text: str) -> None:
    """Also where the tokenizer puts special tokens around a text, which count; a long text is not tokenized whole."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    fast = Fast.from_file(str(tmp_path / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single=f"{USER} $A {END}", special_tokens=[(USER, 1), (END, 0)])
    fast.save(str(tmp_path / "tokenizer.json"))
    for folder, special in ((directory, True), (tmp_path, False), (tmp_path, True)):
        theirs = PreTrainedTokenizerFast.from_pretrained(folder, truncation_side=side)
        ours = Tokenizer(folder)
        for length in (3, 7, 40, 5000):
            expected = theirs(text, truncation=True, max_length=length, add_special_tokens=special)["input_ids"]
            cut = Truncation(length, side)
            assert ours.encode(text, 10, truncation=cut, add_special_tokens=special) == expected
    assert len(ours.encode(text, 10, truncation=Truncation(1, side))) == 1, "no room even for the special tokens"


def test_a_template_sees_the_clients_variables(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    template = "{% if enable_thinking is false %}no{% else %}yes{% endif %}{{ eos_token }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    made = Tokenizer(tmp_path)
    for variables, text in ((None, "yes"), ({"enable_thinking": False}, "no"), ({"eos": 1}, "yes")):
        assert encode_chat(made, MESSAGES, 100, variables) == made.encode(text + END, 100)
    for name in ("messages", "eos_token", "add_generation_prompt", "tools", "raise_exception", "chat_template"):
        with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs.{name} is not for requests to set"):
            encode_chat(made, MESSAGES, 100, {name: []})


def test_text_streams_back_byte_for_byte(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, tokenizer.encode(TEXT, 1000)) == TEXT


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", 10)
    assert len(ids) >= 2
    stream = tokenizer.decode_stream([])
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_bytes_that_are_no_text_are_not_waited_for(tokenizer: Tokenizer) -> None:
    """Whatever waits is decoded again with each further token."""
    (first_half,) = (i for i in range(VOCABULARY) if tokenizer.token_bytes(i) == b"\xc3")
    for prompt in ([], [first_half]):
        stream = tokenizer.decode_stream(prompt)
        assert [stream.push(first_half) for _ in range(6)] == ["", "", "", *["\ufffd"] * 3]
        assert stream.finish() == "\ufffd" * 3


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "é", "日", "🙂", b"\xc3", b"\xf0\x9f", b"\xff"])))
def test_characters_among_bytes_that_are_no_text_are_kept(tokenizer: Tokenizer, pieces: list[str | bytes]) -> None:
    data = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
    id_of = {tokenizer.token_bytes(i): i for i in range(VOCABULARY)}
    stream = tokenizer.decode_stream([])
    text = "".join(stream.push(id_of[bytes([byte])]) for byte in data) + stream.finish()
    assert text.replace("\ufffd", "") == data.decode(errors="ignore")


def test_special_tokens_without_text_are_not_waited_for(tokenizer: Tokenizer) -> None:
    stream = tokenizer.decode_stream([])
    assert {stream.push(0) for _ in range(10)} == {""}
    assert len(stream._pending) <= 3


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_any_ids_stream_without_an_error(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert isinstance(streamed(tokenizer, ids), str)


def test_a_broken_byte_run_does_not_end_a_sentencepiece_stream(tmp_path: Path) -> None:
    """DecodeStream raises "Invalid prefix" there: the run decodes to other text with each further byte."""
    tokenizer = sentencepiece_like(tmp_path)
    ids = [2 + 0x1C, 2 + 0xE2, *[2 + byte for byte in range(0x80, 0xC0)], 258, 259, 260]
    assert streamed(tokenizer, ids * 3).endswith("b")


def test_a_continuation_keeps_its_leading_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    the, a = 258, 259
    assert streamed(tokenizer, [the, a]) == "the a"
    assert streamed(tokenizer, [a], prompt=[the]) == " a"


def test_tokens_have_their_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for token_id in tokenizer.encode(TEXT, 1000):
        assert tokenizer.token_bytes(token_id)
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(TEXT, 1000)) == TEXT.encode()
    assert tokenizer.token_bytes(0) == END.encode()
    assert tokenizer.token_bytes(10**6) == b""
    pieces = sentencepiece_like(tmp_path)
    assert (pieces.token_bytes(2 + 0xE2), pieces.token_bytes(258)) == (b"\xe2", b" the")


def test_a_text_may_be_longer_than_its_tokens(tmp_path: Path) -> None:
    """BERT's tokenizers have no token of spaces, and one for a word that they do not know."""
    fast = FastTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(tmp_path / "tokenizer.json"))
    text = "unknown" * 100 + " " * 100 + "a"
    assert Tokenizer(tmp_path).encode(text, 2) == fast.encode(text).ids == [0, 1]


def test_no_more_than_twice_of_what_fits_is_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A special token takes a hundred times the memory of a character."""
    tokenized = []
    encode = Tokenizer._encode

    def note(self: Tokenizer, text: str, **others: bool) -> Any:
        tokenized.append(encode(self, text, **others))
        return tokenized[-1]

    monkeypatch.setattr(Tokenizer, "_encode", note)
    text = f"{USER}hi{END}" * 6_000
    with pytest.raises(InvalidRequest, match="more than 5000"):
        tokenizer.encode(text, 5000)
    assert len(tokenizer.encode(text, 5000, truncation=Truncation(4000, "left"))) == 4000
    assert max(len(encoding.ids) for encoding in tokenized) < 2 * 5000


@pytest.mark.parametrize("text", ["the fox " * 12_500, "q" * 100_000], ids=["words", "one word"])
def test_a_text_too_long_is_refused_by_its_beginning(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequest, match="more than 5000") as caught:
        tokenizer.encode(text, 5000)
    assert caught.value.code == "context_length_exceeded"


def test_what_the_template_refuses_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no system here") as caught:
        encode_chat(tokenizer, [{"role": "system", "content": "a"}], 100)
    assert caught.value.param == "messages"


def test_a_template_may_name_special_tokens_and_mark_generations(directory: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{{ eos_token }}"
    tokenizer = with_config(directory, tmp_path, chat_template=template, bos_token={"content": USER})
    assert encode_chat(tokenizer, [{"role": "user", "content": "<é>"}], 100) == tokenizer.encode(
        f'{USER}"<é>"{END}', 100
    )


def test_a_template_may_use_tools_that_do_not_exist(directory: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    template = "".join(
        f"{{% if {name} is defined %}}{name} {{% if {name} is not none %}}are some{{% else %}}are none{{% endif %}}"
        "{% endif %}"
        for name in ("tools", "documents", "add_generation_prompt", "continue_final_message", "eos_token")
    )
    tokenizer = with_config(directory, tmp_path, chat_template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert encode_chat(tokenizer, MESSAGES, 1000) == tokenizer.encode(rendered, 1000)


def test_named_templates_use_the_default(directory: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": ASSISTANT}]
    assert encode_chat(with_config(directory, tmp_path, chat_template=named), MESSAGES, 100) == [2]


def test_a_model_without_a_template_says_what_to_use_instead(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        encode_chat(with_config(directory, tmp_path), MESSAGES, 100)


def test_templates_cannot_reach_python(directory: Path, tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InvalidRequest, match="unsafe"):
        encode_chat(with_config(directory, tmp_path, chat_template=template), MESSAGES, 100)


def test_what_cannot_be_a_model_is_refused_with_a_reason(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a directory") as caught:
        Tokenizer(tmp_path / "none")
    assert caught.value.reason == "ModelNotFound"
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{ 'x'|nothing }}"])
def test_what_is_no_template_is_refused_where_it_is_compiled(directory: Path, tmp_path: Path, source: str) -> None:
    with_config(directory, tmp_path, chat_template=source)
    template = read_chat_template(tmp_path)
    assert template is not None
    with pytest.raises(ModelError, match="not valid Jinja"):
        template.compile()


@pytest.mark.parametrize("piece", ["<0xZZ>", "<0x 5>", "<0x+5>", "<0x_5>", "<0xé5>"])
def test_a_token_that_only_looks_like_a_byte_is_its_own_text(tmp_path: Path, piece: str) -> None:
    tokenizer = sentencepiece_like(tmp_path, piece)
    assert tokenizer.token_bytes(261) == piece.encode()
    assert tokenizer.token_bytes(2 + 0xAB) == b"\xab"


def test_a_decoder_that_fails_ends_the_answer_with_a_reason(tmp_path: Path) -> None:
    sentencepiece_like(tmp_path, "b" * 60 + "xc")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    pattern = {"Regex": "^(b|b|bb)*c"}  # of an exponential number of tries
    content["decoder"] = {"type": "Replace", "pattern": pattern, "content": "-"}
    path.write_text(json.dumps(content))
    with pytest.raises(GenerationFailed, match=r"tokenizer\.json cannot decode the answer"):
        streamed(Tokenizer(tmp_path), [261])


@pytest.mark.parametrize("chat_template", [[{"template": "x"}], ["x"], {"default": "x"}, 5])
def test_a_chat_template_of_another_shape_is_refused_with_a_reason(
    directory: Path, tmp_path: Path, chat_template: object
) -> None:
    with pytest.raises(ModelError, match="is not usable"):
        with_config(directory, tmp_path, chat_template=chat_template)


def test_the_api_process_never_imports_torch() -> None:
    code = (
        "import sys, conveyor_engine.__main__, conveyor_engine.serving.server, conveyor_engine.fetching.fetch\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def with_config(directory: Path, folder: Path, **config: object) -> Tokenizer:
    """The tokenizer of `directory` with another tokenizer_config.json and no template file."""
    (folder / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **config}))
    return Tokenizer(folder)


def sentencepiece_like(folder: Path, *more: str) -> Tokenizer:
    """0 unknown, 1 begin, 2..257 bytes, then words whose space is ▁, and from 261 on `more`."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁a", "b", *more]
    fast = Fast(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_a_configuration_that_is_no_object_is_refused(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read: it is not a JSON object"):
        Tokenizer(tmp_path)
