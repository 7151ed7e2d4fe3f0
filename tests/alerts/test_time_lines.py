"""Tests the console's time lines with a real Prometheus, whose data promtool has made."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from conveyor_console.past import AT_ENGINES, DESIRED, FIRST_BYTE, NUM_POINTS, QUEUED, READY, SPANS, TOKENS
from conveyor_console.prometheus import Prometheus
from e2e import promtool
from e2e.cluster import programs
from e2e.cluster.api import wait_until

pytestmark = pytest.mark.brings_promtool

SERVICE = "team/qwen"
STEP = 30
OF = 'namespace="team",inference_service="qwen"'
OTHER = 'namespace="other",inference_service="qwen"'


def write_metrics(now: int) -> str:
    """Return eight days of samples in OpenMetrics' format: 3 + 4 requests at two gateways, and one more a day ago."""
    lines = []
    for at in range(now - 8 * 86_400, now, STEP):
        more = 1 if at < now - 86_400 else 0
        counted = at - (now - 8 * 86_400)
        samples = {
            f'conveyor_gateway_queued_requests{{{OF},pod="a"}}': 3 + more,
            f'conveyor_gateway_queued_requests{{{OF},pod="b"}}': 4,
            f'conveyor_gateway_queued_requests{{{OTHER},pod="a"}}': 1000,
            f'conveyor_gateway_dispatched_requests{{{OF},pod="a"}}': 2,
            f'conveyor_operator_replicas{{{OF},of="ready"}}': 1,
            f'conveyor_operator_replicas{{{OF},of="desired"}}': 2,
            f'conveyor_gateway_generation_tokens_total{{{OF},pod="a"}}': 5 * counted,
            f'conveyor_gateway_time_to_first_byte_seconds_bucket{{{OF},le="1.0"}}': counted,
            f'conveyor_gateway_time_to_first_byte_seconds_bucket{{{OF},le="2.0"}}': 2 * counted,
            f'conveyor_gateway_time_to_first_byte_seconds_bucket{{{OF},le="+Inf"}}': 2 * counted,
        }
        lines += [f"{series} {value} {at}" for series, value in samples.items()]
    return "\n".join([*sorted(lines), "# EOF", ""])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    (folder / "metrics").write_text(write_metrics(int(time.time()) // STEP * STEP))
    (folder / "prometheus.yml").write_text("global: {}\n")
    made = (promtool.build(), "tsdb", "create-blocks-from", "openmetrics", "-q", "metrics", "data")
    done = programs.run(*made, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    log = (folder / "log").open("w")
    process = subprocess.Popen([promtool.SERVER, *flags], cwd=folder, stdout=log, stderr=log)
    try:
        wait_until("Prometheus", lambda: is_ready(f"http://{address}/-/ready"), lambda: check(process, folder), 60)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait(30)
        log.close()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def check(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    assert process.poll() is None, (folder / "log").read_text()


@pytest.mark.parametrize("span", SPANS)
async def test_the_time_lines_are_those_of_the_service(server: str, span: str) -> None:
    async with aiohttp.ClientSession() as session:
        lines = await Prometheus(session, server).read("ann", SERVICE, span)
    assert lines is not None
    values = {name: each[NUM_POINTS // 2] for name, each in lines.values.items()}
    exact = {QUEUED: 8 if span == "7d" else 7, AT_ENGINES: 2, READY: 1, DESIRED: 2}
    assert {name: values[name] for name in exact} == exact
    assert values[TOKENS] == pytest.approx(5, rel=0.1)
    assert values[FIRST_BYTE] == pytest.approx(1.9, rel=0.05)
    assert lines.values[QUEUED][-2] == 7
