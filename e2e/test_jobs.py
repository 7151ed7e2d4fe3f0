"""docs/jobs.md's commands, verbatim but for the namespace, and a suspended job that continues."""

import json
import os
import shutil
from pathlib import Path

from e2e import kube
from e2e.cluster.volumes import host_path_claim
from e2e.demo_model import demo_model_directory
from e2e.services import service
from e2e.test_quickstart import commands, shell
from e2e.test_second_service import default_storage_class

REQUEST = {"messages": [{"role": "user", "content": "How do I use the with statement?"}], "max_tokens": 200}


def test_the_page_s_job_is_suspended_and_continues(namespace: str) -> None:
    folder = demo_model_directory().parent / namespace
    folder.mkdir()
    os.chmod(folder, 0o777)
    volume = host_path_claim(namespace, "results", str(folder))[0]
    volume["spec"] |= {"accessModes": ["ReadWriteOnce"], "storageClassName": default_storage_class()}
    kube.apply(volume)
    try:
        kube.apply(service("chat"), namespace)
        blocks = (block.replace("team-b", namespace) for block in commands("docs/jobs.md"))
        requests, claim, job, wait, read, suspend = blocks
        shell(requests)
        shell(claim)
        suspend_and_continue(job, suspend.replace("nightly", "long"), namespace, folder)
        shell(job)
        output = shell(wait)
        assert "event=ended outcome=completed requests=2 completed=2 failed=0" in output
        lines = [json.loads(line) for line in shell(read).splitlines() if line.startswith("{")]
        assert sorted(line["custom_id"] for line in lines) == ["for", "with"]
        assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in lines)
    finally:
        kube.kubectl("delete", "pv", f"{namespace}-results", "--ignore-not-found", "--wait=false")
        shutil.rmtree(folder)


def suspend_and_continue(job: str, suspend: str, namespace: str, folder: Path) -> None:
    """Run a longer job than the page's. Suspend it after its first results, and let it continue."""
    lines = [{"custom_id": str(number), "url": "/v1/chat/completions", "body": REQUEST} for number in range(200)]
    (folder / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {
        "/input/requests.jsonl": "/results/long.jsonl",
        "/results/nightly": "/results/long",
        "name: nightly": "name: long",
    }
    for given, changed in changes.items():
        job = job.replace(given, changed)
    shell(job)
    kube.wait_until("the job has results", lambda: 0 < count_results(folder) < len(lines))
    shell(suspend)
    kube.wait_until("the job's pod is gone", lambda: not kube.list_("pods", namespace, "job-name=long"))
    num_results = count_results(folder)
    assert 0 < num_results < len(lines)
    shell(suspend.replace("true", "false"))
    kube.kubectl("wait", "-n", namespace, "job/long", "--for=condition=Complete", "--timeout=240s", timeout_seconds=260)
    log = kube.kubectl("logs", "-n", namespace, "job/long")
    assert f"event=started requests={len(lines)} done={num_results} " in log
    assert f"outcome=completed requests={len(lines)} completed={len(lines)} failed=0" in log
    assert count_results(folder) == len(lines)


def count_results(folder: Path) -> int:
    try:
        return len((folder / "long" / "output.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0
