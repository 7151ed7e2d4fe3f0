"""Follows docs/custom.md from its first block to an answer of a real engine and gateway, for a program and a class."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import yaml
from tests.contract.serving import serving
from tests.engine.processes import EngineServer
from tests.gateway.process import GatewayProcess

from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.config import build_engine_config
from e2e import kube
from e2e.cluster.api import Api
from e2e.cluster.paths import REPOSITORY

PAGE = (REPOSITORY / "docs/custom.md").read_text()
PROGRAM, _DECOMPOSED, CLASS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HERE = ("model", "served_model_name", "device", "port")  # what this machine has in place of a pod


def configure(**engine: Any) -> dict[str, Any]:
    """Return the configuration that the operator writes for the manifest's engine."""
    body = yaml.safe_load((kube.MANIFESTS / "custom.yaml").read_text())
    body["spec"]["engine"] |= engine
    text = build_engine_config(build_owner("default", "tiny", "1"), InferenceService.parse(body).spec).text
    fields = {name: value for name, value in yaml.safe_load(text).items() if name not in HERE}
    return fields | {"served_model_name": "tiny"}  # as its service is called here


async def infer(gateway: GatewayProcess, service: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/{service}/v2/models/tiny/infer", json=body) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.slow
async def test_the_page_leads_from_a_program_to_an_answer(
    gateway: GatewayProcess, crd: Api, namespace: str, tmp_path: Path
) -> None:
    shown = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    assert shown[1] == (kube.MANIFESTS / "custom.yaml").read_text().partition("\n")[2]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, check=True)
    sent = re.search(r"-d '(.*?)'", PAGE)
    assert sent
    body = json.loads(sent[1])
    program = torch.export.load(tmp_path / "custom" / "model.pt2")
    expected = program.module()(torch.tensor(body["inputs"][0]["data"], dtype=torch.float32)).flatten().tolist()
    with EngineServer(tmp_path / "engine", tmp_path / "custom", host="0.0.0.0", **configure()) as engine:
        await asyncio.to_thread(engine.wait_ready)
        async with serving(engine, [gateway], crd, namespace) as service:
            status, answer = await infer(gateway, service, body)
            assert (status, answer["outputs"][0]["data"]) == (200, pytest.approx(expected, abs=1e-4))
            body["inputs"][0]["shape"] = [1, 8]
            status, answer = await infer(gateway, service, body)
            assert (status, answer["param"]) == (400, "inputs[0].shape")
        assert engine.metric("conveyor_engine_batch_cost_count", unit="elements") >= 1


@pytest.mark.slow
async def test_the_page_shows_a_class_that_is_served(
    gateway: GatewayProcess, crd: Api, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "my_package.py").write_text(CLASS)
    (tmp_path / "model.json").write_text("{}")
    fields = configure(modelClass="my_package:Mean")
    with EngineServer(tmp_path / "engine", tmp_path, packages=tmp_path, host="0.0.0.0", **fields) as engine:
        await asyncio.to_thread(engine.wait_ready)
        async with serving(engine, [gateway], crd, namespace) as service:
            rows = [[1.0, 2.0, 6.0], [5.0]]
            bodies = [
                {"inputs": [{"name": "numbers", "shape": [1, len(row)], "datatype": "FP32", "data": row}]}
                for row in rows
            ]
            answers = await asyncio.gather(*(infer(gateway, service, body) for body in bodies))
    assert [(status, answer["outputs"][0]["data"]) for status, answer in answers] == [(200, [3.0]), (200, [5.0])]
