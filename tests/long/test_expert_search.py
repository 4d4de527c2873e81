"""2,000 live experts of a 64x64x64 grid, announced in a DHT and found by beam search. Half a minute of one core."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from swarm.experts.prefixes import PrefixAnnouncer
from swarm.experts.searching import ExpertSearch
from swarm.experts.spec import ExpertGrid
from swarm.simulation.virtual import run_virtual
from swarm.simulation.virtual_dht import VirtualDht

GRID = ExpertGrid("ffn.[0:64].[0:64].[0:64]", "ffn")


@pytest.mark.timeout(300)
def test_a_batch_finds_its_best_experts_in_three_reads_and_then_waits_no_more() -> None:
    """Memory only: thousands of experts."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with VirtualDht(12, seed=1) as net:
            flat = random.Random(1).sample(range(GRID.size), 2000)
            made = [PrefixAnnouncer(host, [GRID], 30.0) for host in net.peers]
            before = net.messages
            await asyncio.gather(
                *(a.announce([GRID.uid_at(e) for e in flat[i :: len(made)]], False) for i, a in enumerate(made))
            )
            announced = (net.messages - before) / len(made)
            [client] = await net.grow(1)
            search = ExpertSearch(client, {"ffn": GRID}, lambda _: False)
            await search.start()
            generator = torch.Generator().manual_seed(2)
            logits = [torch.randn(256, 64, generator=generator) for _ in range(3)]
            live = torch.tensor(sorted(flat))
            scores = sum(one[:, at] for one, at in zip(logits, torch.unravel_index(live, GRID.dims), strict=True))
            assert isinstance(scores, torch.Tensor)
            best = live[scores.topk(4).indices]

            def recall(found: torch.Tensor) -> float:
                return float((found.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean())

            began_s, messages = loop.time(), client.dht.stats.messages
            found = await search.search("ffn", logits, 4)
            cold_s, cold = loop.time() - began_s, client.dht.stats.messages - messages
            assert recall(found.experts) >= 0.99
            began_s, messages = loop.time(), client.dht.stats.messages
            for _ in range(60):
                await asyncio.sleep(1)
                found = search.find("ffn", logits, 4)
                assert recall(found.experts) >= 0.99, "renewed by hosts, read again in time"
            fresh = (client.dht.stats.messages - messages) / 60
            await search.close()
            assert announced < 200, "per host"
            assert cold < 400
            assert cold_s < 4.0
            assert fresh < 100, "per second"

    run_virtual(main, seed=1, real_timeout_s=280)
