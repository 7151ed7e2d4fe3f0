"""The workload embed of docs/measuring.md, smaller, on a tiny model; its peer is not in the project's environment."""

import json

import pytest

from conveyor_bench.engine import command as bench
from conveyor_bench.workloads import classifiers, encoder

pytestmark = pytest.mark.usefixtures("every_slice_counts")

EMBED = ["--workload", "embed", "--model-shape", "tiny", "--dtype", "float32", "--rounds", "1"]


def test_vectors_are_those_of_sentence_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-oldest")
    for name, value in (("TEXTS", 9), ("BATCH", 4), ("TOKENS", (8, 40))):
        monkeypatch.setattr(encoder, name, value)
    assert bench.main(EMBED) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["same_float32_vectors_as_sentence_transformers"] is True
    assert told["peers"]["sentence-transformers"]["ratio"]["all"] > 0
    assert told["limit_fraction"] > 0
    right = encoder.open_engine
    monkeypatch.setattr(encoder, "open_engine", lambda *a: lambda texts: right(*a)(texts) + 0.001)
    with pytest.raises(SystemExit, match="differ from sentence-transformers"):
        bench.main(EMBED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "key", "peer"),
    [
        ("rerank", "same_float32_scores_as_sentence_transformers", "sentence-transformers"),
        ("classify", "same_float32_probabilities_as_transformers", "transformers"),
    ],
)
def test_scores_are_those_of_the_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workload: str, key: str, peer: str
) -> None:
    if workload == "rerank":
        pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-oldest")
    for name, value in (("TEXTS", 9), ("BATCH", 4), ("TOKENS", (24, 48))):
        monkeypatch.setattr(encoder, name, value)
    arguments = ["--workload", workload, *EMBED[2:]]
    assert bench.main(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told[key] is True
    assert told["peers"][peer]["ratio"]["all"] > 0
    monkeypatch.setattr(classifiers, "activate", lambda logits, _: logits)
    with pytest.raises(SystemExit, match=f"differ from {peer}"):
        bench.main(arguments)


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="sentence-transformers is missing"):
        bench.main(EMBED)
