"""The first command of README.md and docs/index.md, as it stands there."""

import re
import subprocess
import xml.etree.ElementTree as ET

import pytest

from e2e.cluster.paths import REPOSITORY


@pytest.mark.nightly  # trains for half a minute where the cache has no model, and serves at port 8000
@pytest.mark.timeout(1200)
def test_the_readme_s_first_command_answers_and_scales() -> None:
    picture = REPOSITORY / "build" / "try.svg"
    picture.unlink(missing_ok=True)
    section = (REPOSITORY / "README.md").read_text().partition("## Try it\n")[2]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block
    done = subprocess.run(["bash", "-c", block[1]], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = re.search(r"^> How do I use the with statement\?\n(.+)$", done.stdout, re.MULTILINE)
    assert answer
    assert "with" in answer[1]
    assert " 0 failed; " in done.stdout
    assert "; 1 -> 3 -> 1 engines; " in done.stdout
    assert ET.parse(picture).getroot().tag.endswith("svg")
