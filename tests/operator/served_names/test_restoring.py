"""Runs the commands for backup and restore in docs/operations.md on a real API server."""

import re
import subprocess
from pathlib import Path

from tests.chart.installation import find, render_json
from tests.operator.served_names.test_claims import Teams, holders, name, serve, teams, wait_message

from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary

__all__ = ["name", "teams"]  # fixtures


STOP = "kubectl -n conveyor-system scale deployment conveyor-operator --replicas=0"


def read_commands() -> tuple[str, str]:
    page = (REPOSITORY / "docs/operations.md").read_text()
    section = page.split("## Back up and restore\n")[1].split("\n## ")[0]
    backup, restore = re.findall(r"```sh\n\s*(.*)\n\s*```", section)
    return backup, restore


def run(command: str, kubeconfig: Path, folder: Path) -> None:
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "HOME": str(folder),
        "PATH": f"{binary('kubectl').parent}:/usr/bin:/bin",
    }
    subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=folder, env=environment, check=True, timeout=120)


def test_names_stay_with_their_holders_when_the_page_s_backup_is_restored(
    teams: Teams, name: str, kubeconfig: Path, tmp_path: Path
) -> None:
    """The holder comes last in the alphabet. The backup also has what other tests left on this API server."""
    backup, restore = read_commands()
    operator = teams.start()
    serve(teams.b, "holder", name)
    wait_message(teams.b, "holder", "True", "NameClaimed")
    serve(teams.a, "waits", name)
    wait_message(teams.a, "waits", "False", "NameTaken")
    before = holders(teams.a, teams.b)
    assert before[name] == teams.b.namespace
    run(backup, kubeconfig, tmp_path)
    operator.stop()
    for space in (teams.a, teams.b):
        for kind in ("InferenceService", "ServedName"):
            space.api.delete(space.path(kind))
    assert holders(teams.a, teams.b) == {}
    run(restore, kubeconfig, tmp_path)
    teams.start()
    wait_message(teams.a, "waits", "False", "NameTaken")
    wait_message(teams.b, "holder", "True", "NameClaimed")
    assert holders(teams.a, teams.b) == before


def test_the_page_s_command_stops_the_chart_s_operator(teams: Teams, kubeconfig: Path, tmp_path: Path) -> None:
    deployment = find(render_json(), "Deployment", "conveyor-operator")
    path = f"/apis/apps/v1/namespaces/{deployment['metadata']['namespace']}/deployments"
    teams.a.api.create(path, deployment)
    try:
        run(STOP, kubeconfig, tmp_path)
        assert teams.a.api.get(f"{path}/conveyor-operator")["spec"]["replicas"] == 0
    finally:
        teams.a.api.delete(f"{path}/conveyor-operator")
