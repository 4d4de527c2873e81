"""The command itself: help, version, exit codes, and that none of it loads torch or grpc."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import swarm
from swarm.cli.main import COMMANDS, app
from swarm.errors import SwarmError


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_help_lists_every_command() -> None:
    code, text = invoke("--help")
    assert code == 0
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    code, text = invoke(name, "--help")
    assert code == 0
    assert "Examples" in text
    assert f"swarm {name}" in text
    assert "--json" in text


@pytest.mark.parametrize("args", [["-h"], *([name, "-h"] for name in COMMANDS)])
def test_help_has_a_short_form(args: list[str]) -> None:
    assert CliRunner().invoke(app, args).exit_code == 0


def test_version() -> None:
    code, text = invoke("--version")
    assert code == 0
    assert text.startswith(f"swarm {swarm.__version__} (protocol ")


def test_an_unknown_command_is_a_usage_error() -> None:
    code, text = invoke("dance")
    assert code == 2
    assert "dance" in text


def test_no_command_shows_help() -> None:
    _, text = invoke()
    assert "Usage" in text


def test_exit_codes_in_the_help_are_the_error_trees() -> None:
    _, text = invoke("--help")
    for branch in SwarmError.__subclasses__():
        assert re.search(rf"\b{branch.exit_code}\s+\w", text), branch


def test_help_and_bad_invites_load_neither_torch_nor_grpc() -> None:
    script = """
import sys
from typer.testing import CliRunner
from swarm.cli.main import COMMANDS, app
for arguments in ([], ["--help"], ["--version"], ["join", "garbage"], *([name, "--help"] for name in COMMANDS)):
    CliRunner().invoke(app, arguments)
print([m for m in ("torch", "grpc", "numpy") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"
