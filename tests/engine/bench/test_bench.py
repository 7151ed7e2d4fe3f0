"""The engine's command of docs/benchmarks.md on a tiny model: what it prints last, and what it refuses."""

import json

import pytest
import torch

from conveyor_engine.bench import command as bench


def test_the_last_line_is_one_json_object_with_the_ratio_to_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model-shape", "tiny", "--requests", "3", "--input-tokens", "9", "--output-tokens", "5", "--rounds", "2"]
    assert bench.main([*sizes, "--compare", "hf-static"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    peer = result["peers"]["hf-static"]
    assert peer["ratio"] == pytest.approx(
        result["output_tokens_per_second"] / peer["output_tokens_per_second"], rel=0.01
    )
    assert [len(values) for values in result["rounds"].values()] == [2, 2]
    assert result["same_float32_tokens_as_transformers"] is True
    assert any("tokens_equal" in line for line in lines)
    assert any("fraction_reached" in line for line in lines)


def test_an_engine_whose_steps_run_ahead_is_a_peer_too(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model-shape", "tiny", "--requests", "3", "--input-tokens", "9", "--output-tokens", "5", "--rounds", "1"]
    assert bench.main([*sizes, "--compare", "overlap"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["rounds"]) == ["conveyor", "overlap"]


def test_the_modes_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model-shape", "tiny", "--requests", "8", "--input-tokens", "40", "--output-tokens", "24"]
    assert bench.main([*sizes, "--compare", "modes"]) == 0
    modes = json.loads(capsys.readouterr().out.splitlines()[-1])["modes"]
    assert list(modes) == ["none", "static", "static-packed", "dynamic", "continuous"]
    assert modes["continuous"]["steps"] < modes["none"]["steps"]
    assert [name for name in modes if modes[name]["padding_share"]] == ["static"]
    assert modes["static"]["closes"] == {"full": 4}


def test_a_difference_in_the_tokens_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.HfStatic.generate
    monkeypatch.setattr(bench.HfStatic, "generate", lambda *a: [[t ^ 1 for t in row] for row in right(*a)])
    with pytest.raises(SystemExit, match="tokens differ"):
        bench.check_tokens()


def test_rounds_end_with_the_budget_but_one_is_always_measured() -> None:
    class Instant:
        def generate(self, prompts: bench.Prompts, output_tokens: int) -> bench.Prompts:
            return [[0] * output_tokens for _ in prompts]

    workload, said = bench.Workload(2, 3, 4), []
    figures = bench.measure({"a": Instant(), "b": Instant()}, workload, 10, 5, -1.0, said.append)
    assert said[-1] == "event=budget_spent rounds=1 of=5"
    assert [len(values) for values in figures.values()] == [1, 1]


def test_prompts_are_the_same_for_the_same_seed_only() -> None:
    first, again, other = (bench.random_prompts(3, (4, 2), 50, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(prompt) for prompt in first] == [4, 2, 4]


@pytest.mark.parametrize("flag", ["--requests", "--rounds", "--input-tokens"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err


def test_the_ceiling_counts_every_linear_layer_once() -> None:
    model = torch.nn.Sequential()
    calls: list[tuple[int, int]] = []

    class Counted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append((self.out_features, x.shape[0]))
            return super().forward(x)

    model.append(Counted(4, 5))
    model.append(Counted(4, 7))
    model.dtype, model.get_output_embeddings = torch.float32, lambda: model[1]
    assert bench.gemm_seconds(model, bench.Workload(2, 10, 3)) > 0
    assert set(calls) == {(5, 20), (5, 2), (7, 2)}
