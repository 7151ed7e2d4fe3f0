"""Checks what users check before they install: signatures, bills of materials, and the digests that the chart names."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.chart.installation import helm, pods_of
from tests.release.conftest import write_image

from e2e.cluster import programs
from e2e.release.publishing import Key, Release, verify

pytestmark = pytest.mark.brings_registry


def test_images_chart_and_bills_of_materials_have_the_key_s_signature(release: Release, key: Key) -> None:
    verify(release, key)


def test_another_key_has_not_signed_the_release(release: Release, folder: Path) -> None:
    with pytest.raises(programs.ProgramFailed, match="could not verify envelope"):
        verify(release, Key.generate(folder, "other"))


def test_an_image_that_replaces_the_signed_one_under_its_tag_has_no_signature(
    release: Release, key: Key, folder: Path
) -> None:
    repository = release.control.partition("@")[0]
    source, digest = f"oci:{write_image(folder / 'changed', 'changed')}", folder / "changed-digest"
    options = ("--insecure-policy", "--dest-tls-verify=false", f"--digestfile={digest}")
    programs.run_quietly("skopeo", "copy", *options, source, f"docker://{repository}:release")
    changed = replace(release, control=f"{repository}@{digest.read_text().strip()}")
    with pytest.raises(programs.ProgramFailed, match=r"no signatures|no matching signatures"):
        verify(changed, key)


def test_the_chart_from_the_registry_names_the_signed_images(release: Release) -> None:
    rendered = helm("template", "conveyor", f"oci://{release.chart}", "--plain-http")
    pods = pods_of([item for item in yaml.safe_load_all(rendered) if item])
    assert {spec["containers"][0]["image"] for spec in pods.values()} == {release.control}
    assert f"--engine-image={release.engine}" in pods["conveyor-operator"]["containers"][0]["args"]
