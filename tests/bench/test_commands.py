"""`python -m conveyor_bench` of docs/measuring.md: the list of measurements, and each one's own help."""

import pytest

from conveyor_bench.__main__ import COMMANDS, main


def test_help_lists_each_measurement_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    _, commands = capsys.readouterr().out.split("commands:\n")
    listed = dict(line.split(maxsplit=1) for line in commands.splitlines())
    assert listed == {name: command.help for name, command in COMMANDS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_measurement_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    assert f"usage: python -m conveyor_bench {name} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["engines"], ["--compare", "none"], ["--", "host"]])
def test_without_a_measurement_the_command_says_which_there_are(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert "COMMAND" in capsys.readouterr().err
