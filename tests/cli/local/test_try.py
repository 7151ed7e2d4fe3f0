"""The README's first command, as it stands there."""

import re
import subprocess
import xml.etree.ElementTree as ET

import pytest

from e2e.cluster.paths import REPOSITORY
from e2e.test_quickstart import commands


@pytest.mark.nightly  # trains for half a minute where the cache has no model, and serves at port 8000
@pytest.mark.timeout(1200)
def test_the_readme_s_first_command_answers_and_scales() -> None:
    picture = REPOSITORY / "build" / "try.svg"
    picture.unlink(missing_ok=True)
    command = ["bash", "-c", commands("README.md", "## Try it")[0]]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = re.search(r"^> How do I use the with statement\?\n(.+)$", done.stdout, re.MULTILINE)
    assert answer
    assert "with" in answer[1]
    assert " 0 failed; " in done.stdout
    assert "; 1 -> 3 -> 1 engines; " in done.stdout
    assert ET.parse(picture).getroot().tag.endswith("svg")
