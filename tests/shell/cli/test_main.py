"""The command line: choosing a command, exit codes, and errors without tracebacks."""

import argparse
import importlib.metadata
import pickle
import subprocess
import sys

import pytest

from rollsync.shell.cli import main
from rollsync.shell.cli.registry import COMMANDS, Command, CommandModule
from rollsync.shell.errors import RollsyncError


class Echo:
    """A command that answers with the number it is given."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("code", type=int)

    def run(self, args: argparse.Namespace) -> int:
        code = args.code
        assert isinstance(code, int)
        return code


class Raise:
    """A command that ends in an exception."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        raise self._error


def never() -> CommandModule:
    raise AssertionError("loaded a command that was not chosen")


def raising(error: BaseException) -> tuple[Command, ...]:
    return (Command("fail", "fails", lambda: Raise(error)), Command("other", "", never))


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_is_the_commands_answer(code: int) -> None:
    commands = (Command("echo", "answers", Echo), Command("other", "", never))
    assert main(["echo", str(code)], commands) == code


def test_expected_errors_are_a_line_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    error = RollsyncError("run.yaml: steps is -1", remedy="set steps to 1 or more")
    assert main(["fail"], raising(error)) == 2
    captured = capsys.readouterr()
    assert captured.err == "rollsync: run.yaml: steps is -1\n  set steps to 1 or more\n"
    assert captured.out == ""


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["fail"], raising(ZeroDivisionError()))


def test_what_a_file_system_refuses_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail"], raising(NotADirectoryError(20, "Not a directory", "run/segments"))) == 2
    assert capsys.readouterr().err.startswith("rollsync: run/segments: Not a directory\n  ")
    assert main(["inspect", "n" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = ModuleNotFoundError("No module named 'vllm.engine'", name="vllm.engine")
    assert main(["fail"], raising(error)) == 2
    assert "pip install 'rollsync[vllm]'" in capsys.readouterr().err


def test_a_missing_module_that_no_extra_brings_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError):
        main(["fail"], raising(ModuleNotFoundError("x", name="rollsync.pure.nothing")))


def test_interruption_is_quiet() -> None:
    assert main(["fail"], raising(KeyboardInterrupt())) == 130


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], (Command("other", "does other things", never),)) == 2
    assert "does other things" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"rollsync {importlib.metadata.version('rollsync')}\n"


def test_every_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as exit_info:
            main([command.name, "--help"])
        assert exit_info.value.code == 0, command.name
        assert f"rollsync {command.name}" in capsys.readouterr().out


def test_help_needs_no_heavy_package() -> None:
    code = (
        "import sys\n"
        "from rollsync.shell.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'ray', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class _ValueError(RollsyncError):
    def __init__(self, value: int) -> None:
        super().__init__(f"bad value {value}", remedy="use another")
        self.value = value


def test_errors_survive_pickling_with_their_value() -> None:
    copy = pickle.loads(pickle.dumps(_ValueError(3)))
    assert isinstance(copy, _ValueError)
    assert (copy.value, copy.message, copy.remedy) == (3, "bad value 3", "use another")
    assert str(copy) == "bad value 3 (use another)"
