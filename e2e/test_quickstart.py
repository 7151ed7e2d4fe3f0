"""The README's and the quickstart's commands, verbatim.

Two things stand in for what this cluster has not: the hub is a local one that speaks the hub's protocol and
serves the demo model under the manifest's name, and `engine.device: Auto` lets the engine run without a real GPU.
"""

import os
import re
import subprocess
from pathlib import Path

from e2e import kube
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import search_path


def commands(page: str, section: str | None = None) -> list[str]:
    """The `sh` blocks of a page, or of one of its sections, in order."""
    text = (REPOSITORY / page).read_text()
    if section:
        text = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def shell(script: str, timeout_seconds: float = 500) -> str:
    """Run a block as a person would paste it, with kubectl and helm on the PATH; fails with what it printed."""
    environment = {**os.environ, "PATH": search_path()}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout_seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_readme_shows_the_manifest_that_the_demo_applies() -> None:
    shown = re.search(r"```yaml\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert shown
    assert shown[1] == Path(kube.MANIFESTS / "quickstart.yaml").read_text()


def test_the_readme_s_demo_does_what_it_says_and_its_curl_answers() -> None:
    demo, curl = commands("README.md")[:2]
    out = shell(demo.splitlines()[0])
    assert "0 failed" in out
    assert '"object":"chat.completion"' in shell(curl).replace(" ", "")
    kube.kubectl("delete", "infsvc", "demo", "-n", "default", "--timeout=120s")
