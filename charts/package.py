"""Packages the chart as a release publishes it: with the registry and the digests of its own two images as defaults.

`python charts/package.py --registry ghcr.io/OWNER --control sha256:... --engine sha256:... --out DIR` prints the file
that Helm made. The release workflow calls it once the images are pushed; `make release-dry-run` with made-up digests.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHART = REPOSITORY / "charts" / "conveyor"

sys.path.insert(0, str(REPOSITORY))
from e2e.cluster.tools import binary  # noqa: E402  `e2e` is no installed package

_DIGEST = re.compile(r'^( *digest: )""$', re.MULTILINE)


class NotAsExpected(Exception):
    """The chart's values have not the places that a release fills."""


def fill_values(values: str, registry: str, control: str, engine: str) -> str:
    """The text of values.yaml, comments and all. The control image stands first in it."""
    digests = iter((control, engine))
    values, found = _DIGEST.subn(lambda match: f"{match[1]}{next(digests)}", values)
    values, registries = re.subn(r'^imageRegistry: ""$', f"imageRegistry: {registry}", values, flags=re.MULTILINE)
    if (found, registries) != (2, 1):
        raise NotAsExpected("values.yaml: two empty digests and one empty imageRegistry were expected")
    return values


def package(registry: str, control: str, engine: str, out: Path) -> Path:
    """The path of the packaged chart. Raises CalledProcessError with what Helm said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        chart = shutil.copytree(CHART, Path(folder) / "conveyor")
        file = chart / "values.yaml"
        file.write_text(fill_values(file.read_text(), registry, control, engine))
        _helm("lint", "--strict", chart)
        said = _helm("package", chart, "--destination", out)
    return Path(said.strip().rpartition(": ")[2])


def _helm(*arguments: str | Path) -> str:
    command = [binary("helm"), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python charts/package.py", allow_abbrev=False)
    for name in ("registry", "control", "engine"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    print(package(given.registry, given.control, given.engine, given.out))


if __name__ == "__main__":
    main(sys.argv[1:])
