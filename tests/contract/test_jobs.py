"""Tests an offline job through a real gateway with a real engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.contract.serving import add_engine
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess
from tests.jobs.running import make_line, read_lines, start_job, wait_job

from e2e.cluster.api import Api

pytestmark = pytest.mark.slow
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
CLASSES = [{"name": "live", "level": 0}, {"name": "batch", "level": 10, "maxRequests": 3}]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineServer]:
    model = write_chat_model(tmp_path / "tiny")
    with EngineServer(tmp_path / "engine", model, host="0.0.0.0", max_num_seqs=4) as engine:
        yield engine.wait_ready()


async def test_a_job_waits_for_its_service_and_gets_the_responses_of_any_client(
    engine: EngineServer, crd: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    """The queue has room for three requests of the job's class, so the gateway refuses some of them at first."""
    bodies = [
        {"messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 1 + number % 7, "temperature": 0}
        for number in range(60)
    ]
    lines = [{**make_line(f"r{number}", CHAT), "body": body} for number, body in enumerate(bodies)]
    lines.append({**make_line("none", EMBEDDINGS), "body": {"input": "x"}})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with GatewayProcess(kubeconfig) as gateway:
        url = f"{gateway.url}/{namespace}/tiny"
        job = await start_job(tmp_path, url, "--request-class", "batch")
        cluster = Cluster(crd, namespace)
        cluster.apply_service("tiny", batching={"maxBatchSize": 4}, queue={"classes": CLASSES})
        await add_engine(engine, cluster)
        code, log = await wait_job(job)
        assert code == 0, log
        labels = {"namespace": namespace, "inference_service": "tiny", "reason": "queue_full"}
        assert gateway.metric("conveyor_gateway_dropped_requests_total", **labels) > 0
        found = {line["custom_id"]: line["response"] for line in read_lines(tmp_path / "out" / "output.jsonl")}
        async with aiohttp.ClientSession() as session:
            for number in (0, 17, 59):
                async with session.post(f"{url}{CHAT}", json=bodies[number]) as response:
                    alone = await response.json()
                assert found[f"r{number}"]["body"]["choices"] == alone["choices"]
                assert found[f"r{number}"]["body"]["usage"] == alone["usage"]
        cluster.delete_service("tiny")
    assert len(found) == 60
    (error,) = read_lines(tmp_path / "out" / "errors.jsonl")
    assert (error["custom_id"], error["response"]["status_code"]) == ("none", 400)
    assert error["response"]["body"]["error"]["message"]
