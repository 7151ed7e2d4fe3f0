"""The modes measured on a tiny model: what `make modes` writes of this machine."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from conveyor_bench.modes import measured, requests
from conveyor_bench.modes.figures import Answer
from conveyor_bench.modes.running import ProcessorClock


@pytest.fixture(autouse=True)
def _a_tiny_model_and_short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "SHAPE", "tiny")
    monkeypatch.setattr(measured, "CAPS", (4, 8))
    monkeypatch.setattr(measured, "_FIT_CAP", 8)
    monkeypatch.setattr(requests, "PROMPT_TOKENS", 24)


@pytest.mark.nightly
def test_a_run_has_figures_of_every_mode_beside_transformers_and_what_the_cost_model_predicts() -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:  # in this process, whose sizes are those of the test
        told = measured.measure(3, 3, pool, lines.append)
    assert list(told["modes"]) == ["none", "static", "dynamic", "continuous", "transformers"]
    for caps in told["modes"].values():
        assert list(caps) == ["4", "8"]
        assert len({figures["output_tokens"] for figures in caps.values()}) == 2
        assert all(0 <= figures["utilisation"] <= 1 for figures in caps.values())
    for parts in told["decomposition"].values():
        assert set(parts) == {"policy", "memory", "kernels"}
    assert len(told["latency"]) == 2
    assert told["prediction"]["ratios"]["4"]["static"]["deviation"] == 0
    assert told["step"]["decode_seconds"] > 0
    assert len(lines) == 2 * 6 + 2 * 4


def test_systems_take_turns_and_only_their_own_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_SLICE_SECONDS", 0.0)
    clocks = {name: ProcessorClock() for name in "ab"}
    order: list[str] = []

    def work(name: str) -> object:
        for _ in range(3):
            order.append(name)
            sum(range(20_000))
            yield

    measured.take_turns([(clocks[name], work(name)) for name in "ab"])  # type: ignore[misc]
    assert "".join(order) == "ababab"
    spent = [clock.now() for clock in clocks.values()]
    assert all(spent)
    assert [clock.now() for clock in clocks.values()] == spent, "a paused clock stands"


def test_what_transformers_wastes_follows_from_the_lengths() -> None:
    answers = [Answer(0.0, 0.0, 1.0, 1.0, tokens) for tokens in (10, 40)]
    figures = measured.transformers_figures(answers, 2.0, 2, measured.PROMPT_TOKENS + 50)
    assert figures["utilisation"] == pytest.approx(50 / 80)
    assert figures["padding_waste"] == pytest.approx(30 / (2 * (measured.PROMPT_TOKENS + 39)))
    assert 0 < figures["kv_waste"] < figures["kv_waste_if_reserved"] < 1
    assert figures["output_tokens_per_second"] == 25
