"""`swarm demo` as a user runs it: a process of its own, one JSON line, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(200)  # processes start slowly where cores are busy

KEYS = {
    *("ok", "steps", "first_loss", "final_loss", "unigram_loss", "final_loss_experts_masked", "windows", "seconds"),
    *("killed", "frozen", "restarted", "peers_alive", "failed_expert_calls", "masked_fraction", "tokens_per_s"),
    *("spread_before_round", "spread_after_round"),
}


def demo(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command with a temporary directory of its own; returns exit code and the JSON line."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path), "TMP": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "swarm.cli.main", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=170,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, f"expected one line, got {done.stdout!r}; on standard error: {done.stderr[-3000:]}"
    left = [
        p.info["cmdline"]
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]
    assert left == []
    assert list(tmp_path.glob("swarm-local-*")) == []
    return done.returncode, json.loads(lines[0])


def check_measurements(result: dict[str, Any]) -> None:
    assert result.keys() >= KEYS
    assert result["final_loss"] < result["first_loss"]
    assert result["unigram_loss"] == pytest.approx(3.26, abs=0.03)
    assert result["final_loss_experts_masked"] > result["final_loss"] + 0.1
    assert result["spread_before_round"] > 0
    assert result["spread_after_round"] <= 1e-6
    assert 0 <= result["masked_fraction"] < 0.5
    assert result["tokens_per_s"] > 0
    assert result["seconds"] > 0
    assert result["ok"] is (result["problems"] == [])


def test_demo_without_faults(tmp_path: Path) -> None:
    code, result = demo(tmp_path, "--steps", "60", "--hosts", "2", "--trainers", "2", "--experts", "4", "--no-faults")
    check_measurements(result)
    assert result["steps"] == 60
    assert result["killed"] == result["frozen"] == result["restarted"] == result["windows"] == []
    assert result["peers_alive"] == 5
    assert result["failed_processes"] == []
    assert code == (0 if result["ok"] else 1)


def test_demo_survives_its_faults(tmp_path: Path) -> None:
    code, result = demo(tmp_path, "--steps", "240", "--hosts", "3", "--trainers", "3", "--experts", "4")
    check_measurements(result)
    assert (code, result["problems"]) == (0, [])
    assert result["killed"] == ["host-2", "trainer-2"]
    assert result["frozen"] == ["host-0"]
    assert result["restarted"] == ["trainer-2"]
    assert result["resumed"]["trainer-2"] > 0
    assert [window["fault"] for window in result["windows"]] == ["freeze host-0", "kill host-2", "kill trainer-2"]
    assert all(window["after"] < window["before"] for window in result["windows"])
    assert result["peers_alive"] == 6


def test_a_demo_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path), "TMP": str(tmp_path)}
    command = [sys.executable, "-m", "swarm.cli.main", "demo", "--json", "--steps", "9000", "--hosts", "1"]
    process = subprocess.Popen(
        [*command, "--trainers", "1", "--no-faults"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"All processes are up" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, -signal.SIGTERM)
    assert out == b""
    assert list(tmp_path.glob("swarm-local-*")) == []
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
