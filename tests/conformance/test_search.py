"""A layer over a grid that is searched, on real hosts with records in a real DHT: the same on both transports."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from swarm.config import PeerConfig
from swarm.errors import ExpertsNotReadyError, NotEnoughExpertsError, UsageError
from swarm.experts.client import ExpertClient
from swarm.experts.host import ExpertHost
from swarm.experts.moe import MixtureOfExperts
from swarm.experts.registry import build_expert
from swarm.experts.remote import RemoteExpert
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from swarm.state.transfer import SnapshotStore
from tests.hosting import Hosting
from tests.support import RUN_ID, World

HID = 8
LR = 0.05
GRID = ExpertGrid(
    "ffn.[0:8].[0:8].[0:8]", "ffn", config={"hid": HID}, replicas=1, optimizer=OptimizerSpec("sgd", lr=LR)
)
CONFIG = PeerConfig.preset(
    "local",
    client={"directory_max_experts": 100, "directory_refresh_s": 0.3},
    host={"announce_prefixes_above": 100, "max_experts": 6},
)


async def two_hosts(world: World) -> Hosting:
    """Twelve of 512 experts live."""
    first = await world.endpoint(config=CONFIG)
    endpoints = [await world.endpoint(bootstrap=[first.contact], config=CONFIG) for _ in range(2)]
    hosts = [ExpertHost(e, {"ffn": GRID}, SnapshotStore(e)) for e in endpoints]
    for host in hosts:
        await host.start()
        world.at_close(lambda host=host: host.close(drain=False))  # type: ignore[misc]
    client = ExpertClient(first, {"ffn": GRID})
    await client.start()
    world.at_close(client.close)
    await client.directory.wait_for("ffn", timeout_s=30.0, count=12)
    return Hosting(first, client, hosts)


def test_a_layer_trains_as_the_same_experts_do_in_this_process(world: World) -> None:
    async def main() -> None:
        swarm = await two_hosts(world)
        live = sorted(uid for host in swarm.hosts for uid in host.held)
        assert len(live) == len(dict.fromkeys(live)) == 12
        assert sorted(swarm.experts.directory.live_uids("ffn")) == live
        torch.manual_seed(0)
        moe = MixtureOfExperts(swarm, "ffn", HID, k=3)
        twin, experts = copy.deepcopy(moe), {uid: build_expert(GRID, uid, RUN_ID) for uid in live}
        at = torch.tensor([[int(c) for c in uid.split(".")[1:]] for uid in live])
        for _ in range(3):
            x, target = torch.randn(20, HID).requires_grad_(), torch.randn(20, HID)
            moe.zero_grad()
            out, pending = await moe.forward_async(x)
            (out - target).square().mean().backward()
            await pending.backward()
            y = x.detach().clone().requires_grad_()
            twin.zero_grad()
            split = twin.gate.logits(y)
            scores = torch.stack([one[:, at[:, i]] for i, one in enumerate(split)]).sum(0)
            top = scores.topk(3, dim=-1)
            weights = torch.zeros_like(scores).scatter(1, top.indices, top.values.softmax(-1))
            expected = torch.einsum("te,teo->to", weights, torch.stack([experts[u](y) for u in live], dim=1))
            (expected - target).square().mean().backward()
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=1e-4)
            for a, b in zip(moe.gate.parameters(), twin.gate.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
            with torch.no_grad():
                for expert in experts.values():
                    for p in expert.parameters():
                        assert p.grad is not None
                        p -= LR * p.grad
                        p.grad = None
        assert torch.isfinite(moe.aux_loss())
        assert (moe.stats.lost_updates, moe.stats.masked_fraction) == (0, 0)

    world.run(main)


def test_a_host_that_left_is_no_longer_found_and_waiting_says_how_many_there_are(world: World) -> None:
    async def main() -> None:
        swarm = await two_hosts(world)
        directory = swarm.experts.directory
        with pytest.raises(UsageError, match="min_experts"):
            await directory.wait_for("ffn")
        with pytest.raises(ExpertsNotReadyError, match="12 experts of 'ffn' are online where 13"):
            await directory.wait_for("ffn", timeout_s=0.5, count=13)
        gone, staying = swarm.hosts[0].held, swarm.hosts[1].held
        [contact] = {r.contact for uid in gone for r in directory.replicas(uid)}
        directory.mark_gone(next(iter(gone)), contact.peer_id)
        assert len(directory.live_uids("ffn")) == 11
        await swarm.hosts[0].close(drain=False)
        logits = [torch.zeros(1, 8)] * 3
        while not set(directory.live_uids("ffn")).isdisjoint(gone):
            await directory.search("ffn", logits, 2)  # what is searched stays fresh
            await asyncio.sleep(0.1)
        assert sorted(directory.live_uids("ffn")) == sorted(staying)
        await directory.wait_for("ffn", list(staying), timeout_s=10.0)
        moe = MixtureOfExperts(swarm, "ffn", HID, k=2)
        out, _ = await moe.forward_async(torch.randn(5, HID))
        assert out.shape == (5, HID)
        RemoteExpert(swarm, next(iter(staying)))

    world.run(main)


def test_a_grid_without_hosts_is_an_error_that_says_so(world: World) -> None:
    async def main() -> None:
        endpoint = await world.endpoint(config=CONFIG)
        client = ExpertClient(endpoint, {"ffn": GRID})
        await client.start()
        world.at_close(client.close)
        moe = MixtureOfExperts(Hosting(endpoint, client, []), "ffn", HID)
        with pytest.raises(NotEnoughExpertsError, match="hosts announce 0"):
            await moe.forward_async(torch.randn(2, HID))

    world.run(main)
