"""A service with two LoRA adapters in the claim of its model: each of three model names has an answer of its own.

Then adapters come, change and go while other requests run. No pod is replaced, and no request is lost.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import NotFoundError, OpenAI
from safetensors.torch import save_file

from e2e import kube
from e2e.demo_model import demo_model_directory
from e2e.gateway import gateway_url, service_url
from e2e.services import service

RANK = 4
TARGETS = ("q_proj", "v_proj")
WITH_BAD = {"sql": "Ready", "support": "Ready", "other": "Ready", "bad": "Failed"}


@pytest.mark.nightly  # tests/contract/test_adapters.py shows the same without pods
@pytest.mark.long
def test_each_adapter_and_the_model_answer_differently(namespace: str) -> None:
    folder = demo_model_directory().parent / namespace
    folder.mkdir()
    try:
        adapters = [write_adapter(folder / name, seed) for seed, name in enumerate(("sql", "support"))]
        listed = [{"name": each.name, "uri": f"pvc://models/{namespace}/{each.name}"} for each in adapters]
        # In bfloat16 the answers of two batches may differ.
        spec = {"engine": {"device": "Auto", "dtype": "Float32"}, "queue": {"timeout": "240s"}}
        kube.apply(service("chat", **spec, adapters=listed), namespace)
        kube.wait_ready("chat", namespace)
        own, root = service_url("chat", namespace), f"{gateway_url()}/v1"
        names = ["chat", "chat:sql", "chat:support"]
        answers = {name: send(own, name) for name in names}
        assert len(set(answers.values())) == 3, answers
        assert {name: send(own, name) for name in names} == answers, "greedy answers repeat"
        assert {name: send(root, f"{namespace}/{name}") for name in names} == answers
        parents = {model.id: (model.model_extra or {})["parent"] for model in connect(own).models.list()}
        assert parents == {"chat": None, "chat:sql": "chat", "chat:support": "chat"}
        for url, name in ((own, "chat:other"), (root, f"{namespace}/chat:other")):
            with pytest.raises(NotFoundError):
                send(url, name)
        before = pod_uids(namespace)
        with asking(own, names[:2], {answers[name] for name in names}):
            sql, support = listed
            other = {"name": "other", "uri": sql["uri"]}  # the files of `sql` under another name
            bad = {"name": "bad", "uri": f"pvc://models/{namespace}/none"}
            kube.apply(service("chat", **spec, adapters=[sql, support, other, bad]), namespace)
            assert send(own, "chat:other") == send(root, f"{namespace}/chat:other") == answers["chat:sql"]
            kube.wait_until("bad fails alone", lambda: states(namespace) == WITH_BAD)
            kube.apply(service("chat", **spec, adapters=[sql | {"uri": support["uri"]}, other]), namespace)
            kube.wait_until("sql is replaced", lambda: send(own, "chat:sql") == answers["chat:support"])
            kube.wait_until("support is gone", lambda: is_unknown(own, "chat:support"))
            kube.wait_until("all are loaded", lambda: states(namespace) == {"sql": "Ready", "other": "Ready"})
        assert pod_uids(namespace) == before
    finally:
        shutil.rmtree(folder)


def pod_uids(namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in kube.list_("pods", namespace)}


def states(namespace: str) -> dict[str, str]:
    found = kube.get("inferenceservice", "chat", namespace)
    assert found is not None
    return {each["name"]: each["state"] for each in found["status"].get("adapters", [])}


def is_unknown(url: str, model: str) -> bool:
    try:
        send(url, model)
    except NotFoundError:
        return True
    return False


@contextmanager
def asking(url: str, names: list[str], allowed: set[str]) -> Iterator[None]:
    """Send requests for these models all the time. None may fail, or have another answer than the allowed ones."""
    stop = threading.Event()

    def keep_asking(name: str) -> int:
        number = 0
        while not stop.is_set():
            assert send(url, name) in allowed
            number += 1
        return number

    with ThreadPoolExecutor(len(names)) as pool:
        asked = [pool.submit(keep_asking, name) for name in names]
        try:
            yield
        finally:
            stop.set()
    assert all(each.result() for each in asked)


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter in PEFT's format for the demo's model, with random weights that change its answers."""
    model = json.loads((demo_model_directory() / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model["num_hidden_layers"]):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, model["hidden_size"], generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(count_outputs(model, target), RANK, generator=generator)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    for path in (folder.parent, folder, *folder.iterdir()):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)  # the pods have another user
    return folder


def count_outputs(model: dict[str, Any], target: str) -> int:
    """Return the number of outputs of a projection of the model's attention."""
    heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    return int(head_dim * (heads if target == "q_proj" else model.get("num_key_value_heads") or heads))


def connect(url: str) -> OpenAI:
    return OpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=240
    )  # the kubelet updates a file within two minutes


def send(url: str, model: str) -> str:
    messages = [{"role": "user", "content": "How do I use the with statement?"}]
    answer = connect(url).chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
    return answer.choices[0].message.content or ""
