"""Tests the small command `constrained` of docs/measuring.md: its last line, and that rows follow the schema."""

import json
from pathlib import Path

import pytest
from tests.engine.text.local_grammars import Grammars
from tokenizers import Tokenizer

from conveyor_bench.engine import constrained
from conveyor_engine.text.grammar import build_grammar


def test_it_tells_both_rates_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "3", "--tokens", "12", "--rounds", "2"]
    assert constrained.main(["--model-shape", "tiny", "--dtype", "float32", *sizes]) == 0
    *rounds, last = capsys.readouterr().out.splitlines()
    assert len([line for line in rounds if line.startswith("event=measured")]) == 2
    result = json.loads(last)
    rates = result["constrained_tokens_per_second"], result["free_tokens_per_second"]
    assert min(*rates, result["constrained_of_free"]) > 0
    assert (result["rows"], result["tokens"], result["model_shape"]) == (3, 12, "tiny")


def test_the_vocabulary_has_the_size_of_the_model_and_grammars_limit_it(tmp_path: Path) -> None:
    constrained.write_tokenizer(tmp_path, 2000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2000
    assert max(map(len, tokenizer.get_vocab())) > 5, "pieces are joined"
    answer = Grammars(tmp_path, 2000, []).follow(build_grammar("json", {"type": "integer"}, "schema"))
    mask = answer.build_mask()
    allowed = {tokenizer.id_to_token(token) for token in range(2000) if mask[token // 8] >> token % 8 & 1}
    assert {"-", "7"} <= allowed
    assert not {"a", '"'} & allowed


@pytest.mark.parametrize(("flag", "least"), [("--rows", 1), ("--tokens", 2), ("--rounds", 1)])
def test_sizes_that_measure_nothing_are_refused(flag: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        constrained.main([flag, str(least - 1)])
    assert f"{flag} must be at least {least}" in capsys.readouterr().err
