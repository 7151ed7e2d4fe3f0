"""Tests the bill of materials of an image, with the packages of the machine that runs the tests."""

from pathlib import Path

import pytest

from e2e.release.bill import build_bill

DEP_5 = "Format: x\n\nFiles: *\nLicense: LGPL-2.1+\n\nFiles: b\nLicense: Expat\n Permission is hereby granted\n"
STATUS = """\
Package: libsound
Status: install ok installed
Architecture: amd64
Version: 1:2.0-1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    (tmp_path / "usr/share/doc/libsound").mkdir(parents=True)
    (tmp_path / "usr/share/doc/libsound/copyright").write_text(DEP_5)
    return tmp_path


def test_system_and_python_packages_have_versions_and_licences(root: Path) -> None:
    bill = build_bill(root)
    components = {each["name"]: each for each in bill["components"]}
    assert "removed" not in components
    sound = components["libsound"]
    assert sound["purl"] == "pkg:deb/debian/libsound@1%3A2.0-1?arch=amd64"
    assert [each["license"]["name"] for each in sound["licenses"]] == ["Expat", "LGPL-2.1+"]
    assert [each["license"]["name"] for each in components["pytest"]["licenses"]] == ["MIT"]
    assert components["python"]["version"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert len({each["bom-ref"] for each in bill["components"]}) == len(bill["components"])
