import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--hosts", "1"], "With one host"),
        (["--experts", "7"], "7 experts"),
        (["--steps", "1"], "too few"),
        (["--device", "abacus"], "no device"),
        (["--data", "no/such/file.txt"], "cannot be read"),
    ],
)
def test_options_that_cannot_work_end_with_code_2_and_start_nothing(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert why in done.stderr
    assert "Fix:" in done.stderr


def test_errors_are_one_json_line_for_scripts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "--json", "--data", str(tmp_path / "missing")])
    assert done.exit_code == 2
    told = json.loads(done.stdout)
    assert told["ok"] is False
    assert "cannot be read" in told["error"]["message"]


def test_help_shows_examples() -> None:
    done = CliRunner().invoke(app, ["demo", "--help"])
    assert done.exit_code == 0
    assert "--no-faults" in done.stdout
    assert "Examples" in done.stdout
