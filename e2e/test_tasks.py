"""A service for each task but text alone, with the task's manifest and the command of its page."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
import yaml

from e2e import kube
from e2e.demo.tasks import PICTURES, TASKS
from e2e.demo_model import demo_model_directory
from e2e.demo_model.shapes import SHAPES
from e2e.demo_model.tones import WORDS_IN_FILE
from e2e.gateway import service_url
from e2e.test_quickstart import commands, shell

PAGES = {
    "rerank": "docs/rerank.md",
    "classify": "docs/classify.md",
    "image-classify": "docs/images.md",
    "image-embed": "docs/image-embeddings.md",
    "transcribe": "docs/audio.md",
    "image-generate": "docs/image-generation.md",
    "see": "docs/images-in-chats.md",
    "custom": "docs/custom.md",
}
IN_CI = ("classify", "custom")  # their models take the least time to train


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in TASKS]
)
def test_a_service_of_each_task_answers(namespace: str, name: str) -> None:
    demo_model_directory(TASKS[name].model)
    body = yaml.safe_load((kube.MANIFESTS / f"{name}.yaml").read_text())
    body["metadata"]["namespace"] = namespace
    kube.apply(body)
    kube.wait_until(
        f"{name} is ready", lambda: kube.condition(read(name, namespace), "Ready").get("status") == "True", 240
    )
    status = read(name, namespace)["status"]
    task = body["spec"].get("task", "Generate")
    mode = "Continuous" if name in ("image-generate", "transcribe", "see") else "Dynamic"
    assert (status["model"]["task"], status["effective"]["mode"]) == (task, mode)
    url = service_url(name, namespace).removesuffix("/v1")
    bodies = [body for body in (TASKS[name].body, TASKS[name].second) if body is not None]
    answers = [TASKS[name].post(url, body) for body in bodies]
    assert [answer.status_code for answer in answers] == [200] * len(bodies), answers[-1].text
    lines = TASKS[name].describe(*(answer.json() for answer in answers))
    assert lines
    answer = answers[0]
    if name == "rerank":
        assert answer.json()["results"][0]["document"]["text"].startswith("A dictionary display")
    if name == "classify":
        assert answer.json()["data"][0]["label"] == "dictionaries"
    if name == "image-classify":
        assert [each["label"] for each in answer.json()["data"]] == list(SHAPES)
    if name == "image-embed":
        assert all(f"the {picture} (" in line for picture, line in zip(PICTURES, lines, strict=True))
    if name == "transcribe":
        assert answer.json()["text"] == WORDS_IN_FILE
    if name == "see":
        assert lines == ["a red circle and a blue square", "a red circle"]
    if name == "image-generate":
        assert [line.partition(", ")[0] for line in lines] == ["picture 1: 32x32", "picture 2: 32x32"]
    if name == "custom":
        assert_program_computed(url, demo_model_directory(TASKS[name].model) / "model.pt2")
    if name in PAGES:
        (curl,) = [block for block in commands(PAGES[name]) if block.startswith("curl")]
        output = shell(re.sub(r"http://[^ ]*/default/[\w-]+", url, curl))
        shown = {"transcribe": "text", "image-generate": "b64_json", "see": "a red circle and a blue square"}
        assert shown.get(name, "model") in output


def assert_program_computed(url: str, program: Path) -> None:
    """Check that Triton's client gets through the gateway what the program computes by itself."""
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    tensor = triton.InferInput("input", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    with triton.InferenceServerClient(url.removeprefix("http://"), network_timeout=60) as client:
        assert client.is_model_ready("custom")
        computed = client.infer("custom", [tensor]).as_numpy("output")
    expected = torch.export.load(program).module()(torch.from_numpy(rows)).detach().numpy()
    assert np.abs(computed - expected).max() < 1e-5


def test_a_task_that_the_model_has_not_is_refused_with_what_it_does(namespace: str) -> None:
    demo_model_directory(TASKS["classify"].model)
    body = yaml.safe_load((kube.MANIFESTS / "classify.yaml").read_text())
    body["metadata"] = {"name": "wrong", "namespace": namespace}
    body["spec"]["task"] = "Rerank"
    kube.apply(body)
    kube.wait_until(
        "it is told", lambda: kube.condition(read("wrong", namespace), "Ready").get("reason") == "InvalidConfig", 240
    )
    message = kube.condition(read("wrong", namespace), "Ready")["message"]
    assert "task: Rerank is set, but the model classifies texts" in message
    assert "set task: Classify" in message


def read(name: str, namespace: str) -> Any:
    return kube.get("infsvc", name, namespace)
