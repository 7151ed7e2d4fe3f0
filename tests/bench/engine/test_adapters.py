"""Tests the command `adapters` of docs/measuring.md: the rates of the engine and of PEFT, and their ratios."""

import json

import pytest

from conveyor_bench.engine import adapters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses a property that transformers has renamed
def test_it_tells_the_rates_of_both_systems_and_the_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "3", "--prompt-tokens", "8", "--tokens", "4", "--rounds", "2", "--adapters", "2", "--rank", "2"]
    assert adapters.main(["--model-shape", "tiny", "--dtype", "float32", *sizes, "--compare", "peft"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("event=measured")]) == 4
    result = json.loads(lines[-1])
    for system in ("conveyor", "peft"):
        assert min(result[system].values()) > 0
        assert set(result[system]) == {
            *("prompt_tokens_per_second", "prompt_one_of_base", "prompt_mixed_of_base"),
            *("answer_tokens_per_second", "answer_one_of_base", "answer_mixed_of_base"),
        }
    assert (result["adapters"], result["rank"], result["rows"]) == (2, 2, 3)


@pytest.mark.parametrize(("flag", "least"), [("--adapters", 1), ("--prompt-tokens", 1), ("--tokens", 2)])
def test_sizes_that_measure_nothing_are_refused(flag: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        adapters.main([flag, str(least - 1)])
    assert f"{flag} must be at least {least}" in capsys.readouterr().err
