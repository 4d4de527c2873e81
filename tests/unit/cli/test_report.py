"""What commands print: text, JSON lines, errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from swarm.cli.report import PLAIN_STATUS_EVERY_S, Reporter, reports_errors, short_count
from swarm.errors import BootstrapError, ConfigError


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (5_000_000, "5.0 MB"), (7e12, "7.0 TB")]
)
def test_short_counts(number: float, text: str) -> None:
    assert short_count(number, "B") == text


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(as_json=False, live=False)
    reporter.say("hello", "greeting", to="you")
    assert capsys.readouterr().out == "hello\n"


def test_plain_status_is_written_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(as_json=False, live=False)
    for now in (0.0, 1.0, PLAIN_STATUS_EVERY_S - 0.1, PLAIN_STATUS_EVERY_S, PLAIN_STATUS_EVERY_S + 1):
        reporter.status(f"at {now:.0f}", now)
    assert capsys.readouterr().out == "at 0\nat 10\n"


def test_plain_status_is_written_again_when_something_notable_happens(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(as_json=False, live=False)
    for now, peers in ((0.0, 1), (1.0, 1), (2.0, 2), (2.1, 3), (3.0, 3), (4.0, 3)):
        reporter.status(f"at {now}: {peers}", now, peers)
    assert capsys.readouterr().out == "at 0.0: 1\nat 2.0: 2\nat 3.0: 3\n"


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(as_json=True)
    reporter.say("hello", "greeting", to="you")
    reporter.status("fine", 0.0, peers=3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"kind": "greeting", "to": "you"}, {"kind": "status", "peers": 3}]


def test_a_live_line_ends_with_lasting_lines_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(as_json=False, live=True)
    reporter.status("ONLINE [red]not markup[/red]", 0.0)
    reporter.say("a lasting line", "x")
    reporter.close()
    reporter.close()
    out = capsys.readouterr().out
    assert "ONLINE [red]not markup[/red]" in out
    assert "a lasting line" in out


def test_a_reader_that_goes_away_does_not_end_the_peer() -> None:
    script = """
import sys
from swarm.cli.report import Reporter
reporter = Reporter(as_json=True)
reporter.say("first", "a")
sys.stdin.readline()
for _ in range(3):
    reporter.say("later", "b", text="x" * 100_000)
print("went on", file=sys.stderr)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        assert json.loads(child.stdout.readline()) == {"kind": "a"}
        child.stdout.close()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stderr.read() == "went on\n"
        assert child.wait(30) == 0


def test_an_error_is_one_sentence_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command(as_json: bool) -> None:
        raise ConfigError("It is wrong.", fix="Right it.")

    with pytest.raises(typer.Exit) as caught:
        command(as_json=False)
    assert caught.value.exit_code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "swarm: [E1001] It is wrong. Fix: Right it.\n"


def test_an_error_as_json_has_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command(as_json: bool) -> None:
        raise BootstrapError("Nobody answers.", reasons={"a:1": "refused"})

    with pytest.raises(typer.Exit) as caught:
        command(as_json=True)
    assert caught.value.exit_code == 3
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    assert shown["ok"] is False
    assert shown["exit_code"] == 3
    assert shown["error"] == {
        "code": 2002,
        "name": "BootstrapError",
        "message": "Nobody answers.",
        "fix": None,
        "reasons": {"a:1": "refused"},
    }


def test_other_exceptions_are_bugs_and_pass() -> None:
    @reports_errors
    def command(as_json: bool) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command(as_json=True)
