"""Children and warden with real but tiny processes; the peers inside are tested in the integration tests."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swarm.errors import ProcessError, UsageError
from swarm.simulation.children import ChildProcess, spawn
from swarm.simulation.process import StopRequest, resolve_function
from swarm.simulation.status import PID_FILE, STATUS_FILE, ProcessConfig, append_json
from swarm.simulation.warden import clear, processes_in


def sleeper(directory: Path) -> subprocess.Popen[bytes]:
    """A process that would sleep for long, known to the warden by its pid file."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    directory.mkdir(parents=True)
    record = {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
    (directory / PID_FILE).write_text(json.dumps(record))
    return process


def test_warden_ends_running_and_frozen_processes_and_removes_the_directory(tmp_path: Path) -> None:
    work = tmp_path / "work"
    running, frozen = sleeper(work / "host-0"), sleeper(work / "host-1")
    psutil.Process(frozen.pid).suspend()
    assert sorted(p.pid for p in processes_in(work)) == sorted([running.pid, frozen.pid])
    warden = spawn(["swarm.simulation.warden", str(work)])
    clear(work, grace_s=0.05)
    for process in (running, frozen):
        process.wait(10)
        assert not psutil.pid_exists(process.pid)
    assert not work.exists()
    warden.communicate(b"done\n", timeout=20)
    assert warden.returncode == 0


def test_warden_acts_when_its_input_ends_and_not_when_told_that_all_is_done(tmp_path: Path) -> None:
    for said, remains in ((b"", False), (b"done\n", True)):
        work = tmp_path / f"work-{remains}"
        work.mkdir()
        warden = spawn(["swarm.simulation.warden", str(work)])
        warden.communicate(said, timeout=20)
        assert work.exists() is remains


def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    process = sleeper(tmp_path / "host-0")
    try:
        (tmp_path / "host-0" / PID_FILE).write_text(json.dumps({"pid": process.pid, "created": 1.0}))
        (tmp_path / "host-1").mkdir()
        (tmp_path / "host-1" / PID_FILE).write_text("{")
        assert processes_in(tmp_path) == []
        clear(tmp_path, grace_s=0.0)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def child(tmp_path: Path) -> ChildProcess:
    return ChildProcess(ProcessConfig("host-0", "host", str(tmp_path)))


def test_a_process_that_is_not_running_cannot_be_killed_or_frozen(tmp_path: Path) -> None:
    one = child(tmp_path)
    with pytest.raises(ProcessError, match="not running"):
        one.kill()
    with pytest.raises(ProcessError, match="not running"):
        one.freeze()
    one.thaw()
    one.stop()
    assert one.logs() == ""
    assert one.events() == []


def test_status_lines_tell_stage_and_identity(tmp_path: Path) -> None:
    one = child(tmp_path)
    append_json(tmp_path / STATUS_FILE, {"stage": "joining the run", "pid": 1})
    append_json(tmp_path / STATUS_FILE, {"stage": "ready", "peer_id": "abc"})
    one.wait_ready(timeout_s=1.0)
    assert (one.stage, one.peer_id) == ("ready", "abc")


def test_a_process_that_failed_after_it_had_joined_did_start(tmp_path: Path) -> None:
    one = child(tmp_path)
    append_json(tmp_path / STATUS_FILE, {"stage": "ready", "peer_id": "abc"})
    append_json(tmp_path / STATUS_FILE, {"stage": "failed", "during": "training", "error": "bad luck"})
    one.wait_ready(timeout_s=1.0)
    assert one.state == "failed"


def test_a_failed_start_names_the_stage_and_shows_the_log(tmp_path: Path) -> None:
    one = child(tmp_path)
    (tmp_path / "log.txt").write_text("\n".join(f"line {i}" for i in range(100)))
    append_json(tmp_path / STATUS_FILE, {"stage": "failed", "during": "joining the run", "error": "no route"})
    with pytest.raises(ProcessError, match="host-0 failed while joining the run: no route") as error:
        one.wait_ready(timeout_s=1.0)
    assert "line 99" in str(error.value)
    assert "line 3\n" not in str(error.value)


def test_functions_are_named_by_module_and_name() -> None:
    assert resolve_function("json:dumps") is json.dumps
    for spec in ("json", "json:", "json:nothing", "no_such_module_here:f"):
        with pytest.raises(UsageError):
            resolve_function(spec)


def test_training_does_not_begin_after_a_stop_request() -> None:
    stop = StopRequest()
    stop.begin_training()
    stop.end_training()
    stop.event.set()
    with pytest.raises(KeyboardInterrupt):
        stop.begin_training()
