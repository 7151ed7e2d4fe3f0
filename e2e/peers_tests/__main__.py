"""`python -m e2e.peers_tests [TEST...]`: run vLLM's own tests against the engine. Called by `make peers-tests`.

Progress goes to standard error, one line for each test. Standard output has one JSON object with `passed`, `failed`,
`not_applicable` and `files`. A run of all files also writes their table into docs/peers-tests.md.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.paths import REPOSITORY
from e2e.peers_tests import source
from e2e.peers_tests.files import FILES
from e2e.peers_tests.page import read_results, write_table

TEST_SECONDS_MAX = 180
PAGE = REPOSITORY / "docs" / "peers-tests.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.peers_tests", description=__doc__)
    parser.add_argument("test", nargs="*", help="as pytest has it, below vLLM's tests/ (default: all files)")
    tests: list[str] = parser.parse_args().test
    _report("vLLM's source, its dependencies and the models")
    folder = source.fetch()
    python = source.install(folder)
    models = provide_models(folder)
    _provide_adapter(models)
    with tempfile.TemporaryDirectory(prefix="conveyor-peers-") as out:
        report = Path(out) / "report.jsonl"
        programs.run(
            python, "-m", "pytest", "-p", "e2e.peers_tests.plugin", "-p", "no:cacheprovider", "--quiet", "--tb=short",
            "--no-header", "--continue-on-collection-errors", f"--timeout={TEST_SECONDS_MAX}",
            *(f"tests/{test}" for test in tests or FILES),
            cwd=folder, env=_environment(folder, models, report), stdout=sys.stderr,
        )  # fmt: skip
        results = read_results(report.read_text().splitlines())
    if not tests:
        write_table(PAGE, results, source.VERSION)
    print(json.dumps(results.as_json(), indent=1))


def provide_models(folder: Path) -> Path:
    """Return the folder of the models. They are made again only if the scripts that make them have changed."""
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in ("models.py", "lessons.py", "words.py"))
    directory = source.FOLDER / f"models-{hashlib.sha256(text + source.VERSION.encode()).hexdigest()[:8]}"
    if not directory.exists():
        from e2e.peers_tests.models import make  # imports torch

        for old in source.FOLDER.glob("models-*"):
            shutil.rmtree(old)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=source.FOLDER))
        make(draft, folder)
        draft.rename(directory)
    return directory


def _provide_adapter(models: Path) -> None:
    """Make the adapter, once."""
    if not (models / "none" / "adapter_config.json").exists():
        from e2e.peers_tests import adapters  # imports torch

        adapters.make(models / "none", models / "chat")


def _environment(folder: Path, models: Path, report: Path) -> dict[str, str]:
    """Return the environment of the tests. The tests use no hub: the hub's cache has all models that they name."""
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]),
        "HF_HOME": str(models),
        "HF_HUB_CACHE": str(models / "hub"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "CONVEYOR_PYTHON": sys.executable,
        "CONVEYOR_MODELS": str(models),
        "CONVEYOR_REPORT": str(report),
    }


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
