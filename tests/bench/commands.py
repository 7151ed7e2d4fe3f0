"""The commands of docs/measuring.md still run, on a little of everything; what they measure here says nothing."""

import re
import subprocess

from e2e.cluster.paths import REPOSITORY

COMMANDS = re.findall(r"```sh\n(.*)\n```", (REPOSITORY / "docs/measuring.md").read_text())


def run(program: str, sizes: str) -> str:
    """What that command of the page prints; 1 is the status of a figure that misses its bar, as it may here."""
    (command,) = [command for command in COMMANDS if f"conveyor_bench {program} " in f"{command} "]
    done = subprocess.run(f"{command} {sizes}", shell=True, cwd=REPOSITORY, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
