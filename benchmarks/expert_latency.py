"""Step times of a trainer while one of its hosts is frozen, or far away.

    python -m benchmarks.expert_latency --json

Three hosts in processes of their own behind links, two replicas of every expert, one trainer here: a mixture of experts
does forward and backward passes. The same steps are timed undisturbed, with one host frozen (SIGSTOP), and with one
host whose link adds 250 ms each way; it is the host that is asked most. The first steps after a fault are reported
apart: that is what noticing it costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import swarm

DIM, TOKENS, EXPERTS = 64, 64, 6
WARM_STEPS = 40
SETTLE_S = 5.0
"""Time in which trainer and hosts take back a host that was frozen."""
NOTICING_STEPS = 10
"""Steps after a fault that are reported apart."""


def p95(values: list[float]) -> float:
    return sorted(values)[-(-95 * len(values) // 100) - 1]


class Trainer:
    """Steps of one mixture of experts, timed."""

    def __init__(self, peer: swarm.Peer) -> None:
        self.peer = peer
        self.moe = swarm.MixtureOfExperts(peer, "ffn", dim=DIM, k=2)
        self.optimizer = torch.optim.SGD(self.moe.parameters(), lr=1e-3)

    def busiest(self, local: swarm.LocalSwarm) -> str:
        """Name of the host that is asked most at the moment."""
        attempts, asked = self.peer.experts.attempts, Counter[str]()
        prepare = attempts.prepare

        def counting(contact: Any, *rest: Any) -> Any:
            asked[str(contact.peer_id)] += 1
            return prepare(contact, *rest)

        attempts.prepare = counting  # type: ignore[assignment, method-assign]
        self.steps(10)
        attempts.prepare = prepare  # type: ignore[method-assign]
        [(peer_id, _)] = asked.most_common(1)
        return next(name for name in local.names("host") if local.peer_id(name) == peer_id)

    def steps(self, n: int) -> list[float]:
        times = []
        for _ in range(n):
            x = torch.randn(TOKENS, DIM)
            begun = time.perf_counter()
            self.optimizer.zero_grad()
            y = self.moe(x)
            ((y - x).square().mean() + self.moe.aux_loss()).backward()
            self.optimizer.step()
            times.append(time.perf_counter() - begun)
        return times

    def phase(self, n: int, begin: Callable[[], object] | None = None) -> dict[str, Any]:
        before, timeouts = self.moe.stats, self.peer.experts.attempts.timeouts
        if begin is not None:
            begin()
        noticing, times = self.steps(NOTICING_STEPS), self.steps(n)
        stats = self.moe.stats.since(before)
        return {
            "first_steps_ms": [round(t * 1e3, 1) for t in noticing],
            "p50_ms": round(statistics.median(times) * 1e3, 2),
            "p95_ms": round(p95(times) * 1e3, 2),
            "steps": n,
            "requests": stats.requests,
            "hedges": stats.hedges,
            "hedge_wins": stats.hedge_wins,
            "timeouts": self.peer.experts.attempts.timeouts - timeouts,
            "lost_updates": stats.lost_updates,
            "masked_tokens": stats.masked_tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--steps", type=int, default=200, help="steps of each phase")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    grid = swarm.ExpertGrid(
        f"ffn.[0:{EXPERTS}]", "ffn", config={"hid": DIM}, replicas=2, optimizer=swarm.OptimizerSpec("sgd", lr=1e-3)
    )
    result: dict[str, Any] = {"benchmark": "expert_latency", "hosts": 3, "experts": EXPERTS, "replicas": 2}
    with swarm.LocalSwarm(experts=[grid], hosts=3, links=True) as local, local.peer(role="trainer") as peer:
        peer.wait_for_experts("ffn", timeout_s=60.0)
        local.wait_until(lambda view: view.min_replicas("ffn") == 2, timeout_s=60.0)
        trainer = Trainer(peer)
        trainer.steps(WARM_STEPS)
        result["undisturbed"] = trainer.phase(options.steps)
        target = trainer.busiest(local)
        result["frozen"] = trainer.phase(options.steps, lambda: local.freeze(target))
        local.thaw(target)
        local.wait_until(lambda view: view.min_replicas("ffn") == 2, timeout_s=60.0)
        time.sleep(SETTLE_S)
        trainer.steps(WARM_STEPS)
        result["undisturbed_again"] = trainer.phase(options.steps)
        target = trainer.busiest(local)
        result["far"] = trainer.phase(options.steps, lambda: local.shape(target, latency_ms=250.0))
    calm = min(result[name]["p95_ms"] for name in ("undisturbed", "undisturbed_again"))
    for name in ("frozen", "far"):
        result[name]["p95_ratio"] = round(result[name]["p95_ms"] / calm, 2)
    if options.json:
        print(json.dumps(result))
        return
    for name in ("undisturbed", "frozen", "undisturbed_again", "far"):
        print(name, result[name])


if __name__ == "__main__":
    main()
