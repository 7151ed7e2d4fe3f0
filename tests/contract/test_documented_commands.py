"""Tests that a test runs each block and command of the documentation, or that a reason is given why none does.

The comment above a block says which test, `<!-- test: PATH::NAME -->`, or why there is none, `<!-- no test: WHY -->`.
A test runs a block if its file names the page (it reads the block from there) or has the command word for word.
"""

import re

import yaml

from e2e.cluster.images import IMAGES
from e2e.cluster.paths import REPOSITORY

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in sorted((*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("**/*.md")))
}
BLOCK = re.compile(r"(?:^<!-- (test|no test): ([^\n]+) -->\n)?^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_block_says_which_test_runs_it() -> None:
    found = [(page, *block) for page, text in PAGES.items() for block in BLOCK.findall(text)]
    assert len(found) > 30
    assert not [(page, block) for page, kind, _, block in found if not kind]
    for page, kind, test, block in found:
        assert kind == "no test" or runs(test, page, block), (page, test, block)


def runs(test: str, page: str, block: str) -> bool:
    path, _, name = test.partition("::")
    source = (REPOSITORY / path).read_text()
    return f"def {name}(" in source and (page in source or block.splitlines()[0] in source)


def test_every_command_in_a_sentence_is_run_by_a_test() -> None:
    """Text with fewer than four words only names a command."""
    sentences = "\n".join(BLOCK.sub("", text) for text in PAGES.values())
    commands = set(re.findall(r"`((?:kubectl|helm|docker|curl) [^`\n]+)`", sentences))
    sources = [path.read_text() for folder in ("tests", "e2e") for path in (REPOSITORY / folder).rglob("*.py")]
    long = {command for command in commands if len(command.split()) >= 4}
    assert len(long) > 8
    for command in long:
        assert any(command in source or command.replace("NAME", "qwen") in source for source in sources), command


def test_every_target_that_a_page_names_is_there() -> None:
    """CI runs README.md's `make test` and `make e2e`."""
    text = "\n".join(PAGES.values())
    named = set(re.findall(r"`make ([a-z0-9-]+)(?: [A-Z]+=\S+)?`", text)) | set(
        re.findall(r"^make ([a-z0-9-]+)", text, re.M)
    )
    assert {"demo", "demo-down", "test", "test-all", "e2e", "help", "check", "generate"} <= named
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    parts = {f"test-{folder.name}" for folder in (REPOSITORY / "tests").iterdir() if folder.is_dir()}
    assert named <= targets | parts
    run = re.search(r"^steps=\((.*?)^\)", (REPOSITORY / ".ci" / "run").read_text(), re.DOTALL | re.MULTILINE)
    assert run
    assert {"check", "test", "e2e"} <= set(run[1].replace('"', "").split()) <= targets


def test_the_quickstart_builds_the_images_that_there_are() -> None:
    version = yaml.safe_load((REPOSITORY / "charts" / "conveyor" / "Chart.yaml").read_text())["appVersion"]
    built = re.findall(r"docker build -f (\S+) -t registry.example.com/(\S+):(\S+) \.$", PAGES["docs/install.md"], re.M)
    assert built == [
        (str(image.dockerfile.relative_to(REPOSITORY)), image.repository.removeprefix("docker.io/"), version)
        for image in IMAGES.values()
    ]
