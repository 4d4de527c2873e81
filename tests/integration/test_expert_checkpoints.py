"""Experts outlive the death of all their hosts, in real processes."""

from __future__ import annotations

import time

import pytest
import torch

import swarm
from swarm.errors import NotEnoughExpertsError
from swarm.simulation.pytest_plugin import LocalSwarmFactory

pytestmark = pytest.mark.timeout(150)  # processes start slowly where cores are busy
GRID = swarm.ExpertGrid(
    "ffn.[0:1]", "ffn", config={"hid": 8}, replicas=2, optimizer=swarm.OptimizerSpec("adam", lr=0.01)
)
UID = "ffn.0"


def saved(s: swarm.LocalSwarm, name: str) -> int:
    return max((e["weight_version"] for e in s.events(name) if e["kind"] == "ExpertSaved"), default=0)


def restored(s: swarm.LocalSwarm, name: str) -> list[int]:
    return [e["weight_version"] for e in s.events(name) if e["kind"] == "ExpertRestored"]


def test_all_hosts_killed_and_started_again_the_newest_checkpoint_wins(local_swarm: LocalSwarmFactory) -> None:
    torch.set_num_threads(1)
    quick = {"checkpoint_s": 0.4, "placement_s": 0.4, "replica_sync_s": 0.5, "announce_ttl_s": 3.0}
    with local_swarm([GRID], hosts=2, config={"host": quick}) as s:
        s.wait_until(lambda view: view.min_replicas("ffn") == 2)
        with s.peer(role="trainer") as peer:
            peer.wait_for_experts("ffn", timeout_s=30)
            expert = swarm.RemoteExpert(peer, UID)

            def step() -> bool:
                try:
                    expert(torch.randn(4, 8)).square().mean().backward()
                except NotEnoughExpertsError:
                    return False  # the host that was asked has just died, or has just come back unnoticed
                return True

            def train_until_saved(name: str, version: int) -> int:
                deadline = time.monotonic() + 60
                while saved(s, name) <= version:
                    assert time.monotonic() < deadline, s.events(name)
                    step()
                    time.sleep(0.02)
                return saved(s, name)

            older = max(train_until_saved("host-1", 3), saved(s, "host-1"))
            s.kill("host-1")
            newer = train_until_saved("host-0", saved(s, "host-0") + older)
            s.kill("host-0")
            assert newer > older > 3
            for name in ("host-1", "host-0"):
                s.restart(name, wait=False)

            def announced() -> list[int]:
                records = peer.run_sync(peer.dht.get("experts/ffn", fresh=True), timeout_s=10.0)
                ids = [s.peer_id(name) for name in s.names("host")]
                return [r.body["experts"].get(UID, -1) for r in records if str(r.author) in ids]

            deadline = time.monotonic() + 60
            while len(versions := announced()) < 2 or min(versions) < newer:
                assert time.monotonic() < deadline, (newer, versions)
                time.sleep(0.1)
            while not step():
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert max([*restored(s, "host-0"), *restored(s, "host-1")]) >= newer
        assert not [e for n in s.names("host") for e in s.events(n) if e["kind"] in ("ExpertLost", "TaskFailed")]
