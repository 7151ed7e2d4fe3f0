"""Tests the program's messages when it cannot answer."""

from pathlib import Path

import pytest
from tests.metrics.aggregation import Aggregated

from conveyor_kubectl.command import main
from conveyor_protocol.families import FAMILIES, PIPELINES, VECTORS


def test_without_a_cluster_the_error_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_kubeconfig = tmp_path / "kubeconfig"
    no_kubeconfig.write_text("a: [")
    for path in (tmp_path / "nowhere", no_kubeconfig):
        assert main(["explain", "qwen", f"--kubeconfig={path}"]) == 1
        errors = capsys.readouterr().err
        assert errors.startswith("kubectl conveyor: cannot load a kubeconfig: ")
        assert len(errors.splitlines()) == 1


def test_what_it_repeats_commands_no_terminal(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "qwen", f"--kubeconfig={nowhere}", "--context=no\x1b[2J\udc80where"]) == 1
    errors = capsys.readouterr().err
    assert "where" in errors
    assert errors.removesuffix("\n").isprintable()


def test_a_cluster_that_does_not_answer_is_one_sentence(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "qwen", f"--kubeconfig={nowhere}"]) == 1
    assert capsys.readouterr().err.startswith("kubectl conveyor: the API server does not answer: ")


def test_a_context_and_a_name_that_are_not_there_are_named(
    aggregated: Aggregated, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = f"--kubeconfig={aggregated.plane.kubeconfig}"
    assert main(["explain", "qwen", kubeconfig, "--context=other"]) == 1
    assert "other" in capsys.readouterr().err
    assert main(["explain", "no-such-service", kubeconfig]) == 1
    assert (
        capsys.readouterr().err
        == "kubectl conveyor: there is no InferenceService no-such-service in namespace default\n"
    )


def test_families_of_models_are_listed_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAMILIES) + len(VECTORS) + len(PIPELINES)
    assert main(["models", "colbert"]) == 0
    assert "/rerank" in capsys.readouterr().out
    assert main(["models", "QWEN3.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"]
    assert main(["models", "Diffusion xl"]) == 0
    assert capsys.readouterr().out.split()[::4] == ["StableDiffusionXLPipeline", "ImageGenerate"]
    assert main(["models", "none\x1b[2J"]) == 1
    assert capsys.readouterr().out.removesuffix("\n").isprintable()
