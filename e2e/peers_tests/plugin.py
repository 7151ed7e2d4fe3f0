"""The pytest plugin that replaces `vllm serve` by the engine. Runs in vLLM's environment.

Environment variables configure it: CONVEYOR_PYTHON is the Python that runs the engine, CONVEYOR_MODELS the folder of
`models`, and CONVEYOR_REPORT the file that gets a line of JSON for each test.
"""

import fnmatch
import hashlib
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm.platforms
from huggingface_hub import snapshot_download
from vllm.platforms.cpu import CpuPlatform

from e2e.cluster import programs
from e2e.peers_tests.arguments import NotApplicable, translate
from e2e.peers_tests.files import NOT_APPLICABLE
from e2e.peers_tests.templates import with_changes

vllm.platforms.current_platform = CpuPlatform()  # vLLM detects its platform by its build, but is not built here
utils = importlib.import_module("tests.utils")  # imports vLLM's platform

REASON = "not applicable: "
_MODELS = Path(os.environ["CONVEYOR_MODELS"])


class EngineServer(utils.RemoteOpenAIServer):  # type: ignore[misc]
    """A server that is started and ended like vLLM's, but its process is the engine."""

    def _pre_download_model(self, model: str, args: Any) -> None:
        """Do nothing: the models are already in the cache."""

    def _get_gpu_memory_used(self) -> None:
        return None

    def _start_server(self, model: str, vllm_serve_args: list[str], env_dict: dict[str, str] | None) -> None:
        try:
            arguments = translate(vllm_serve_args)
        except NotApplicable as error:
            pytest.skip(f"{REASON}{error}")
        directory = Path(model if os.path.isdir(model) else snapshot_download(model)).resolve()
        if arguments.chat_template is not None or arguments.config:
            what = f"{directory}\n{arguments.config}\n{arguments.chat_template}"
            changed = _MODELS / "changed" / hashlib.sha256(what.encode()).hexdigest()[:8]
            directory = with_changes(directory, changed, arguments.chat_template, arguments.config)
        command = ["-m", "conveyor_engine", "serve", "--model", str(directory)]
        if "--served-model-name" not in arguments.settings:
            command += ["--served-model-name", model]
        if "--host" not in arguments.settings:
            command += ["--host", "127.0.0.1"]
        command += ["--device", "cpu", "--dtype", "float32", "--warmup", "false", *arguments.settings]
        python, environment = Path(os.environ["CONVEYOR_PYTHON"]), _environment()
        self.proc = programs.start(
            python, *command, env=environment, stdout=sys.stdout, stderr=sys.stderr, start_new_session=True
        )


def _environment() -> dict[str, str]:
    """Return the environment variables without those that only this process needs."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


utils.RemoteOpenAIServer = EngineServer


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the tests that need a server, and mark those that are not applicable."""
    chosen, others = [], []
    for item in items:
        (chosen if _needs_server(item) else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)
    for item in chosen:
        for pattern, reason in NOT_APPLICABLE:
            if fnmatch.fnmatchcase(item.nodeid.removeprefix("tests/"), pattern.replace("[", "[[]")):
                item.add_marker(pytest.mark.skip(reason=REASON + reason))
                break


def _needs_server(item: pytest.Item) -> bool:
    """Return whether the test, or one of its fixtures, starts a server."""
    functions = [getattr(item, "function", None)]
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures is not None:
        functions += [definition.func for group in fixtures.name2fixturedefs.values() for definition in group]
    sources = [inspect.getsource(function) for function in functions if function]
    return any("RemoteOpenAIServer(" in source or "getfixturevalue(" in source for source in sources)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write a line for each phase that did not pass, and for each call that passed."""
    report = yield
    if report.when == "call" or not report.passed:
        reason = str(call.excinfo.value) if call.excinfo else ""
        line = {"test": item.nodeid.removeprefix("tests/"), "outcome": report.outcome, "reason": reason[:2000]}
        with Path(os.environ["CONVEYOR_REPORT"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report
