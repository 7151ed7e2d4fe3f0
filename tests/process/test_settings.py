"""Tests flags, variables, files and defaults of a program with one setting of each kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from conveyor_process import kinds
from conveyor_process.settings import Given, Program, SettingsError, optional, required, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str = required("whose", kinds.WORDS)
    port: int = setting(80, "where 100 % of it comes in", kinds.PORT)
    share: float | None = setting(None, "how much", optional(kinds.number(0.5, 1)))
    mode: Literal["a", "b"] = setting("a", "how", kinds.literal(Literal["a", "b"]))
    note: str | None = setting(None, "what else", optional(kinds.TEXT))
    loud: bool = setting(False, "whether", kinds.TRUE_OR_FALSE)


def find_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.loud and settings.port == 80:
        yield "loud", "is not for `port: 80`"


PROGRAM = Program("conveyor_test", "A test.", Settings, find_conflicts)


def parse(*arguments: str, **variables: str) -> Settings:
    return PROGRAM.parse(arguments, {f"CONVEYOR_TEST_{name}": value for name, value in variables.items()})


def build(**content: object) -> Settings:
    return PROGRAM.build([Given(name, value, "file x", is_text=False) for name, value in content.items()])


def test_a_flag_wins_over_a_variable_over_a_file_over_the_default() -> None:
    file = [Given(name, value, "file x", is_text=False) for name, value in {"port": 1, "share": 1, "mode": "b"}.items()]
    variables = PROGRAM.from_environment({"CONVEYOR_TEST_PORT": "2", "CONVEYOR_TEST_SHARE": "0.5", "PATH": "/bin"})
    flags = PROGRAM.from_flags({"port": "3", "name": "n", "config": "x"})
    settings = PROGRAM.build([*file, *variables, *flags])
    assert settings == Settings(name="n", port=3, share=0.5, mode="b")


def test_a_file_has_numbers_as_numbers_and_nothing_as_null() -> None:
    assert build(name="n", port=8, share=1, loud=True, note=None) == Settings(name="n", port=8, share=1.0, loud=True)


def test_null_as_text_is_nothing_unless_the_setting_is_text() -> None:
    settings = parse("--name=null", "--share=null", "--note=null")
    assert (settings.name, settings.share, settings.note) == ("null", None, "null")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"port": "80"}, "file x: `port` must be a port number from 0 to 65535, not '80'"),
        ({"port": 80.5}, "not '80.5'"),
        ({"port": True}, "not 'true'"),
        ({"port": None}, "not null"),
        ({"port": [80]}, r"not \[80\]"),
        ({"port": 10**20}, "`port` must be"),
        ({"share": float("nan")}, "`share` must be a number from 0.5 to 1, not 'nan'"),
        ({"share": 0.4}, "not '0.4'"),
        ({"mode": "A"}, "`mode` must be one of a, b, not 'A'"),
        ({"name": 5}, "`name` must be text that is not empty, not 5"),
        ({"name": ""}, "not ''"),
        ({"loud": 1}, "`loud` must be true or false, not '1'"),
        ({"nam": "n"}, "file x: unknown key 'nam'; the known keys are name, port,"),
    ],
)
def test_a_file_with_what_cannot_be_used_is_refused(content: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        build(**{"name": "n"} | content)


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["--port=x"], {}, "^flag --port: `port` must be"),
        (["--port=-1"], {}, "not '-1'"),
        (["--port=٣"], {}, "not '٣'"),
        ([], {"PORT": "tcp://10.0.0.1:80"}, "^environment variable CONVEYOR_TEST_PORT: `port` must be"),
        ([], {"PROT": "1"}, "^environment variable CONVEYOR_TEST_PROT: unknown key 'prot'"),
        (["--loud=TRUE"], {}, "^flag --loud: `loud` is not for `port: 80`"),
    ],
)
def test_a_sentence_begins_with_where_the_value_came_from(
    arguments: list[str], variables: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        parse("--name=n", *arguments, **variables)


def test_a_missing_required_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="`name` is missing: set --name or CONVEYOR_TEST_NAME"):
        parse()


def test_help_describes_the_values_of_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for row in PROGRAM.rows():
        assert f"{row.meaning}: {row.must_be} (default {row.default!r}; ${row.variable})" in text


def test_part_of_a_flag_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--nam=n")
    assert "--nam=n" in capsys.readouterr().err
