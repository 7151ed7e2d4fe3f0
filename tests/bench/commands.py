"""Runs the commands of docs/measuring.md with small sizes. Their figures mean nothing here."""

import re
import subprocess

from e2e.cluster.paths import REPOSITORY

COMMANDS = re.findall(r"```sh\n(.*)\n```", (REPOSITORY / "docs/measuring.md").read_text())


def run(program: str, sizes: str) -> str:
    """Return the output of the page's command. The status may be 1, because figures may miss their bars here."""
    (command,) = [command for command in COMMANDS if f"conveyor_bench {program} " in f"{command} "]
    done = subprocess.run(f"{command} {sizes}", shell=True, cwd=REPOSITORY, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
