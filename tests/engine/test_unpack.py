"""Checks that a GGUF file becomes a model directory: its tokenizer, chat template, facts, and what is refused."""

import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tests.engine.gguf_files import finish, write_model
from tests.engine.tiny_models import save_tiny_model
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from conveyor_engine.errors import ModelError
from conveyor_engine.gguf import config, numbers
from conveyor_engine.gguf import unpack as unpacking
from conveyor_engine.gguf.files import choose_files, find_files
from conveyor_engine.gguf.header import Header, read_header
from conveyor_engine.gguf.unpack import unpack
from conveyor_engine.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TEXTS = ("hello world", "  two  spaces\n\n", "It's 1234 years, naïve Ünïcode 日本語 🎉", "<|im_start|>user<|im_end|> x")


def train() -> FastTokenizer:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()] * 3, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FastTokenizer]:
    folder, tokenizer = tmp_path_factory.mktemp("gguf"), train()
    vocabulary = tokenizer.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    model = save_tiny_model("qwen2", folder, hidden_size=32, vocab_size=len(vocabulary))
    (folder / "Tiny-1B-GGUF").mkdir()
    write_model(
        model,
        folder / "Tiny-1B-GGUF" / "tiny-Q8_0.gguf",
        "Q8_0",
        tokens=sorted(vocabulary, key=vocabulary.__getitem__),
        merges=merges,
        chat_template=TEMPLATE,
    )
    return folder / "Tiny-1B-GGUF", tokenizer


def test_texts_have_the_tokens_of_the_original_tokenizer(served: tuple[Path, FastTokenizer]) -> None:
    folder, original = served
    tokenizer = Tokenizer(unpack(folder))
    for text in TEXTS:
        assert tokenizer.encode(text, 1000) == original.encode(text).ids
        assert tokenizer.decode(original.encode(text).ids) == text


def test_chat_template_ends_and_format_are_those_of_the_file(served: tuple[Path, FastTokenizer]) -> None:
    folder, original = served
    directory = unpack(folder)
    assert directory.name == folder.name
    assert Tokenizer(directory).render_chat([{"role": "user", "content": "a"}], 100) == "<|im_start|>a<|im_end|>"
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [original.token_to_id("<|im_end|>"), original.token_to_id("<|endoftext|>"), 5]
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "gguf", "format": "Q8_0"}


def test_a_token_at_the_beginning_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    write_model(save_tiny_model("qwen2", tmp_path, hidden_size=32), tmp_path / "a.gguf", values={"add_bos_token": True})
    assert Tokenizer(unpack(tmp_path / "a.gguf")).encode("t1", 9) == [0, 0, 1]


def test_the_directory_is_removed_when_the_process_ends_and_not_by_its_children(
    served: tuple[Path, FastTokenizer],
) -> None:
    program = (
        "import os, sys; from pathlib import Path; from conveyor_engine.gguf.unpack import unpack\n"
        "made = unpack(Path(sys.argv[1]))\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait(); print(made.is_dir(), made)"
    )
    said = subprocess.run([sys.executable, "-c", program, str(served[0])], capture_output=True, text=True, check=True)
    was_there, path = said.stdout.split()
    assert was_there == "True"
    assert not Path(path).exists()


def test_a_folder_with_safetensors_is_left_as_it_is(tmp_path: Path) -> None:
    write_model(save_tiny_model("qwen2", tmp_path, hidden_size=32), tmp_path / "a.gguf")
    assert unpack(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["m-Q4_K_M.gguf", "mmproj-F16.gguf", "imatrix.gguf", "README.md"], ["m-Q4_K_M.gguf"]),
        (["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"], ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        (["config.json"], []),
    ],
)
def test_the_files_of_a_model_are_found(tmp_path: Path, names: list[str], found: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in find_files(tmp_path)] == found


def test_a_folder_with_several_models_is_refused_and_one_file_may_be_named(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="has several models, m-Q4_0, m-Q8_0: name one file"):
        find_files(tmp_path)
    assert find_files(tmp_path / "m-Q8_0.gguf") == [tmp_path / "m-Q8_0.gguf"]


HUB = ("a-Q4_K_M.gguf", "a-UD-Q4_K_XL.gguf", "BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["a-Q4_K_M.gguf"]),
        ("q4_k_xl", ["a-UD-Q4_K_XL.gguf"]),
        ("a-Q4_K_M.gguf", ["a-Q4_K_M.gguf"]),
        ("BF16", ["BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf"]),
    ],
)
def test_one_model_of_a_repository_is_chosen_by_the_end_of_its_name(wanted: str, found: list[str]) -> None:
    assert choose_files("org/a", HUB, wanted) == found


@pytest.mark.parametrize(
    ("wanted", "problem"), [("", "add one to the URI, as in `:Q4_K_M`"), ("Q8_0", "'Q8_0'"), ("M", "'M'")]
)
def test_the_models_of_a_repository_are_named_if_none_is_chosen(wanted: str, problem: str) -> None:
    with pytest.raises(ModelError, match="it has BF16/a-BF16, a-Q4_K_M, a-UD-Q4_K_XL") as caught:
        choose_files("org/a", HUB, wanted)
    assert problem in str(caught.value)


def pack(*parts: Any) -> bytes:
    """Pack (format, value) pairs; a text has its length in front."""
    return b"".join(
        struct.pack("<Q", len(part)) + part.encode() if isinstance(part, str) else struct.pack(f"<{part[0]}", part[1])
        for part in parts
    )


BEGIN = b"GGUF" + pack(("I", 3))
HUGE = 2**63
HOSTILE = {
    "no GGUF": b"GGML" + bytes(20),
    "an old version": b"GGUF" + pack(("I", 1), ("Q", 0), ("Q", 0)),
    "no end": BEGIN,
    "endless values": BEGIN + pack(("Q", 0), ("Q", HUGE)),
    "endless tensors": BEGIN + pack(("Q", HUGE), ("Q", 0)),
    "an endless text": BEGIN + pack(("Q", 0), ("Q", 1), ("Q", HUGE)),
    "an endless array": BEGIN + pack(("Q", 0), ("Q", 1), "a", ("I", 9), ("I", 4), ("Q", HUGE)),
    "an endless array of texts": BEGIN + pack(("Q", 0), ("Q", 1), "a", ("I", 9), ("I", 8), ("Q", HUGE)),
    "an array of arrays": BEGIN + pack(("Q", 0), ("Q", 1), "a", ("I", 9), ("I", 9), ("Q", 1)),
    "an unknown type": BEGIN + pack(("Q", 0), ("Q", 1), "a", ("I", 99), ("I", 0)),
    "no alignment": BEGIN + pack(("Q", 0), ("Q", 1), "general.alignment", ("I", 4), ("I", 0)),
    "many dimensions": BEGIN + pack(("Q", 1), ("Q", 0), "a", ("I", 2**31)),
    "no numbers": BEGIN + pack(("Q", 1), ("Q", 0), "a", ("I", 1), ("Q", 0), ("I", 0), ("Q", 0)),
    "a huge tensor": BEGIN + pack(("Q", 1), ("Q", 0), "a", ("I", 2), ("Q", 2**40), ("Q", 2**40), ("I", 0), ("Q", 0)),
    "a tensor behind the end": BEGIN + pack(("Q", 1), ("Q", 0), "a", ("I", 1), ("Q", 1), ("I", 0), ("Q", 2**62)),
    "half a block": BEGIN + pack(("Q", 1), ("Q", 0), "a", ("I", 1), ("Q", 16), ("I", 8), ("Q", 0)) + bytes(99),
    "bytes that are no text": BEGIN + pack(("Q", 0), ("Q", 1), ("Q", 2)) + b"\xff\xfe",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.gguf").write_bytes(HOSTILE[name])
    with pytest.raises(ModelError, match="is not a whole GGUF file, copy or download it again"):
        read_header([tmp_path / "a.gguf"])


def test_any_damage_of_a_header_is_refused_or_read_within_the_file(
    served: tuple[Path, FastTokenizer], tmp_path: Path
) -> None:
    """Each tensor that is found lies within the file."""
    (path,) = served[0].glob("*.gguf")
    whole, chance = path.read_bytes(), random.Random(0)
    end = min(place.start for place in read_header([path]).tensors.values())
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 2, 8))):
            content[chance.randrange(8, end)] = chance.choice((0, 1, 127, 128, 255))
        copy = tmp_path / "a.gguf"
        copy.write_bytes(content[: chance.choice((len(content), chance.randrange(len(content))))])
        try:
            header = read_header([copy])
        except ModelError:
            continue
        for place in header.tensors.values():
            assert 0 < place.start <= place.start + place.num_bytes <= copy.stat().st_size


def write_values(path: Path, **values: Any) -> None:
    writer = GGUFWriter(path, values.pop("architecture", "llama"))
    for key, value in values.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"architecture": "rwkv7"}, "has the architecture 'rwkv7'; this engine reads gemma2, gemma3, gemma4"),
        ({"architecture": "qwen35"}, "the GGUF file's metadata is not that of qwen35"),
        ({}, "the GGUF file's llama.feed_forward_length is None, not one int"),
        ({"llama.feed_forward_length": [1, 2]}, r"feed_forward_length is \[1, 2\], not one int"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    write_values(tmp_path / "a.gguf", **values)
    with pytest.raises(ModelError, match=problem):
        unpack(tmp_path / "a.gguf")


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    model = save_tiny_model("qwen2", tmp_path, hidden_size=32)
    write_model(model, tmp_path / "a.gguf", merges=["not there"])
    with pytest.raises(ModelError, match=r"the GGUF file's tokenizer cannot be used: .*BPE"):
        unpack(tmp_path / "a.gguf")


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
@pytest.mark.parametrize(("factor", "kind"), [(4.0, "linear"), (1.0, "default")])
def test_positions_are_scaled_linearly_if_a_factor_has_no_type(key: str, factor: float, kind: str) -> None:
    header = Header({"general.architecture": "llama", f"llama.rope.{key}": factor}, {})
    assert numbers.read_rope(header)["rope_type"] == kind


@pytest.mark.parametrize("token", [-1, 2, 2**32 - 1, True, [1], "1"])
def test_a_special_token_outside_of_the_vocabulary_does_not_count(token: Any) -> None:
    names = {f"tokenizer.ggml.{key}_token_id": token for key in ("eos", "padding")}
    header = Header({"tokenizer.ggml.tokens": ["a", "b"], **names}, {})
    assert config._find_token(header, "padding") is None
    assert unpacking._find_ends(header, ["a", "b"]) == []
    assert unpacking._read_settings(header, {}, ["a", "b"]) == {}


def test_in_the_format_of_gpt_oss_a_part_of_an_answer_does_not_end_it() -> None:
    """Its <|end|> stands behind the thinking. Phi's ends the answer."""
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    kinds = {"tokenizer.ggml.token_type": [1, 3, 3, 3, 3], "tokenizer.ggml.eos_token_id": 2}
    assert unpacking._find_ends(Header({"tokenizer.ggml.tokens": tokens, **kinds}, {}), tokens) == [2, 3, 4]
    phi = [token for token in tokens if token not in ("<|return|>", "<|call|>")]
    kinds = {"tokenizer.ggml.token_type": [1, 3, 3], "tokenizer.ggml.eos_token_id": 2}
    assert unpacking._find_ends(Header({"tokenizer.ggml.tokens": phi, **kinds}, {}), phi) == [1, 2]
