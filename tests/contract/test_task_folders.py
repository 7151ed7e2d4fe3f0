"""Checks that a task's folder has all code that only this task needs."""

import ast
from collections import defaultdict
from pathlib import Path

from e2e.cluster.paths import REPOSITORY

ENGINE = REPOSITORY / "engine" / "conveyor_engine"
# Parts of a step on the device. One task uses them today, and they know no task.
GENERAL = ("execution.graphs.", "execution.models.", "execution.attention.")


def list_modules() -> dict[str, Path]:
    """Return the engine's modules by their names below `conveyor_engine`."""
    files = {".".join(path.relative_to(ENGINE).with_suffix("").parts): path for path in ENGINE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def find_importers(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return for each module those that import it."""
    importers = defaultdict(set)
    for importer, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("conveyor_engine"):
                package = (node.module or "").removeprefix("conveyor_engine").removeprefix(".")
                for alias in node.names:
                    full = f"{package}.{alias.name}".removeprefix(".")
                    importers[full if full in modules else package].add(importer)
    return importers


def find_owners(importers: dict[str, set[str]]) -> dict[str, str]:
    """Return the task of each module that only one task needs, directly or through other such modules."""
    owners = {name: name.split(".")[1] for name in list_modules() if name.startswith("tasks.")}
    while True:
        found = {
            module: owners[next(iter(by))]
            for module, by in importers.items()
            if module not in owners and len({owners.get(each, "") for each in by}) == 1 and by & owners.keys()
        }
        if not found:
            return owners
        owners |= found


def test_code_that_one_task_needs_is_in_its_folder() -> None:
    owners = find_owners(find_importers(list_modules()))
    elsewhere = {name: task for name, task in owners.items() if not name.startswith(("tasks.", *GENERAL))}
    assert not elsewhere, "move these to the folder of their task"


def test_a_module_that_one_process_of_a_task_needs_is_in_its_package() -> None:
    """A module at the top of a task's folder is one of a process, or shared by several."""
    processes = ("about", "scheduling", "execution", "reading", "preparing", "serving", "describing")
    public = {"tasks.custom.model"}  # models of users import it
    importers, misplaced = find_importers(list_modules()), {}
    for name in list_modules():
        parts = name.split(".")
        if len(parts) == 3 and parts[0] == "tasks" and parts[2] not in processes and name not in public:
            users = {each.split(".")[2] for each in importers[name] if each.startswith(f"tasks.{parts[1]}.")}
            if len(users) < 2:
                misplaced[name] = users
    assert not misplaced
