"""Prints the bill of materials of the image in which it runs: Debian's packages and Python's, with their licences.

    docker run --rm --interactive IMAGE python - < e2e/release/bill.py > IMAGE.cdx.json

The format is CycloneDX 1.5. The script uses the standard library alone, so it needs no program on the machine, and
nothing in the image but Python.
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path("/")


def read_system_packages(root: Path) -> Iterator[dict[str, Any]]:
    """Yield a component for each installed package of Debian, with the licences that its copyright file names."""
    for paragraph in (root / "var/lib/dpkg/status").read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{name}@{quote(version)}?arch={fields['Architecture']}"
            yield build_component(name, version, purl, read_copyright(root / "usr/share/doc" / name / "copyright"))


def read_copyright(file: Path) -> list[str]:
    """Return the short names of licences in a copyright file; none if it is not machine-readable, or is missing."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return sorted(set(re.findall(r"^License: *(\S[^\n]*)$", text, re.MULTILINE)))


def read_python_packages() -> Iterator[dict[str, Any]]:
    for found in metadata.distributions():
        name, about = found.metadata["Name"], found.metadata
        classifiers = [each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or [] if "License ::" in each]
        text = (about.get_all("License") or [""])[0].strip().partition("\n")[0]
        licences = about.get_all("License-Expression") or classifiers or ([text] if text else [])
        yield build_component(name, found.version, f"pkg:pypi/{name.lower()}@{quote(found.version)}", licences)


def build_component(name: str, version: str, purl: str, licences: list[str]) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
    return component | {"licenses": [{"license": {"name": licence}} for licence in licences]}


def build_bill(root: Path = ROOT) -> dict[str, Any]:
    python = build_component(
        "python", sys.version.split()[0], f"pkg:generic/python@{sys.version.split()[0]}", ["PSF-2.0"]
    )
    components = {each["bom-ref"]: each for each in (python, *read_system_packages(root), *read_python_packages())}
    ordered = [components[reference] for reference in sorted(components)]
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": ordered}


if __name__ == "__main__":
    json.dump(build_bill(), sys.stdout, indent=1)
