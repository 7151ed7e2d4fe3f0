"""Tests flags and environment variables."""

import pytest

from conveyor_operator.settings import PROGRAM, Settings
from conveyor_process.settings import SettingsError


def test_nothing_given_means_the_whole_cluster_and_the_defaults() -> None:
    assert PROGRAM.parse([], {}) == Settings()


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_default() -> None:
    environment = {"CONVEYOR_OPERATOR_ENGINE_IMAGE": "from/env:1", "CONVEYOR_OPERATOR_ADMIN_PORT": "9000"}
    settings = PROGRAM.parse(["--engine-image", "from/flag:1"], environment)
    assert (settings.engine_image, settings.admin_port) == ("from/flag:1", 9000)


def test_namespaces_are_a_list_with_commas() -> None:
    assert PROGRAM.parse(["--watch-namespaces", "a, b,"], {}).watch_namespaces == ("a", "b")


def test_the_url_of_a_service_is_the_gateways_path() -> None:
    settings = PROGRAM.parse(["--system-namespace", "sys", "--cluster-domain", "example.org"], {})
    assert settings.service_url("team", "qwen") == "http://conveyor-gateway.sys.svc.example.org/team/qwen/v1"
    public = PROGRAM.parse(["--gateway-url", "https://ai.example.org/"], {})
    assert public.service_url("team", "qwen") == "https://ai.example.org/team/qwen/v1"


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--workers=0", "`workers` must be a whole number from 1 to 1000, not '0'"),
        ("--workers=many", "`workers` must be a whole number from 1 to 1000, not 'many'"),
        ("--admin-port=70000", "must be a port number from 0 to 65535"),
        ("--metrics-api=maybe", "must be true or false"),
        ("--log-level=loud", "must be DEBUG, INFO, WARNING or ERROR"),
        ("--watch-namespaces=team-a,team.b", "must be names of namespaces with commas between, not 'team.b'"),
        ("--watch-namespaces=Team", "not 'Team'"),
        (f"--watch-namespaces={'a' * 64}", "not 'aaa"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_could_be(flag: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        PROGRAM.parse([flag], {})


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("WORKERS", "`workers` must be a whole number"),
        ("METRICS_API", "`metrics_api` must be true or false"),
        ("WORKER", "CONVEYOR_OPERATOR_WORKER"),
    ],
)
def test_a_wrong_and_an_unknown_variable_are_refused(variable: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        PROGRAM.parse([], {f"CONVEYOR_OPERATOR_{variable}": "many"})


def test_an_unknown_flag_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PROGRAM.parse(["--unknown"], {})
    assert "unrecognized arguments: --unknown" in capsys.readouterr().err
