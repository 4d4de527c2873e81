"""Local swarms of real processes: faults at will, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
import torch

import swarm
from swarm.errors import ProcessError, UsageError
from swarm.simulation.pytest_plugin import LocalSwarmFactory

pytestmark = pytest.mark.timeout(150)  # processes start slowly where cores are busy
GRID = swarm.ExpertGrid("ffn.[0:2].[0:2]", "ffn", config={"hid": 8})


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def alive(pids: Iterable[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_life_of_a_local_swarm(local_swarm: LocalSwarmFactory, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    result = tmp_path / "result.json"
    with local_swarm(
        [GRID], hosts=3, trainers=1, train="tests.integration.local_training:one_step", train_args={"file": str(result)}
    ) as s:
        pids, directory = [s.pid(name) for name in s.names()], s.directory
        assert s.names() == ["host-0", "host-1", "host-2", "trainer-0"]
        assert len({s.peer_id(name) for name in s.names()}) == 4

        # training in a process of its own
        assert s.wait("trainer-0", timeout_s=40) == 0
        assert s.state("trainer-0") == "done"
        assert json.loads(result.read_text())["name"] == "trainer-0"

        # a peer in this process
        s.wait_until(lambda view: view.min_replicas("ffn") == 2)
        with s.peer(role="trainer") as peer:
            peer.wait_for_experts("ffn", timeout_s=30)
            moe = swarm.MixtureOfExperts(peer, "ffn", dim=8)
            assert moe(torch.randn(4, 8)).shape == (4, 8)

        # a killed host is replaced, and comes back as itself
        identity = s.peer_id("host-1")
        s.kill("host-1")
        assert s.state("host-1") == "killed"
        assert s.view().peer("host-1") is None
        view = s.wait_until(lambda view: view.min_replicas("ffn") == 2)
        assert all(identity not in holders for holders in view.holders["ffn"].values())
        s.restart("host-1")
        assert s.peer_id("host-1") == identity
        view = s.wait_until(lambda view: len(view.by_role("host")) == 3)
        assert {p.name for p in view.by_role("host")} == {"host-0", "host-1", "host-2"}

        # a frozen host does nothing until it is thawed
        s.freeze("host-0")
        assert s.state("host-0") == "frozen"
        assert psutil.Process(s.pid("host-0")).status() == psutil.STATUS_STOPPED
        s.thaw("host-0")
        assert s.state("host-0") == "ready"
        s.freeze("host-2", seconds=0.3)
        wait_for(lambda: s.state("host-2") == "ready")

        # what processes tell
        assert "PeerStateChanged" in {event["kind"] for event in s.events("host-0")}
        assert all(event["time_s"] >= 0 for event in s.events("host-0"))
        assert isinstance(s.logs("host-0"), str)
        with pytest.raises(UsageError, match="host-9"):
            s.kill("host-9")
        s.freeze("host-0")  # a frozen process does not keep close() from working
        pids += [s.pid(name) for name in s.names()]
    assert alive(pids) == []
    assert not directory.exists()


def test_condition_that_never_comes_true_is_a_typed_error(local_swarm: LocalSwarmFactory) -> None:
    with local_swarm(hosts=0) as s, pytest.raises(ProcessError, match="did not get there within"):
        s.wait_until(lambda view: bool(view.by_role("host")), timeout_s=0.1)


def test_bootstrap_in_a_process_of_its_own_and_training_that_is_told_to_stop(local_swarm: LocalSwarmFactory) -> None:
    with local_swarm(
        [GRID], hosts=0, trainers=1, train="tests.integration.local_training:forever", bootstrap="process"
    ) as s:
        assert s.names() == ["bootstrap", "trainer-0"]
        s.wait_until(lambda view: {p.name for p in view.peers} >= {"bootstrap", "trainer-0"})
        s.stop("trainer-0")
        assert s.state("trainer-0") == "left"


def test_a_failed_start_names_process_and_stage_and_leaves_nothing() -> None:
    s = swarm.LocalSwarm(hosts=0, trainers=1, train="no_such_module:train", bootstrap="process")
    with pytest.raises(ProcessError, match="trainer-0 failed while importing") as error:
        s.start()
    assert "no_such_module" in str(error.value)
    assert not s.directory.exists()
    assert alive(s.pid(name) for name in s.names()) == []


def test_training_that_raises_is_a_failed_process_with_a_log(local_swarm: LocalSwarmFactory) -> None:
    with local_swarm(hosts=0, trainers=1, train="tests.integration.local_training:broken") as s:
        assert s.wait("trainer-0", timeout_s=30) == 1
        assert s.state("trainer-0") == "failed"
        assert "this training function is broken" in s.logs("trainer-0")


@pytest.mark.parametrize("end", ["kill", "interrupt"])
def test_nothing_outlives_the_parent(end: str) -> None:
    flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.local_parent"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        creationflags=flags,
    )
    try:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        assert line, "the program ended early"
        told = json.loads(line)
        assert len(alive(told["pids"])) == 2
        if end == "kill":
            parent.kill()
        else:
            parent.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT) if os.name == "nt" else signal.SIGINT)
        parent.wait(30)
        wait_for(lambda: not alive(told["pids"]) and not os.path.exists(told["directory"]), timeout_s=25)
    finally:
        parent.kill()
        parent.communicate()
