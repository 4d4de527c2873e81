"""No gradient is applied twice anywhere, whatever requests, answers and hosts go through; none is lost unnoticed.

In memory only: the faults happen at chosen requests, in virtual time. Every gradient changes a coordinate of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swarm.config import PeerConfig
from swarm.errors import CallTimeoutError, PeerUnreachableError
from swarm.experts.calls import CallOptions, ExpertCall, UpdateLost
from swarm.experts.client import ExpertClient
from swarm.experts.host import ExpertHost
from swarm.experts.optimizing import ExpertOptimizer, Gradient
from swarm.experts.protocol import CALL
from swarm.experts.spec import ExpertGrid, OptimizerSpec, TensorSpec, expert
from swarm.net.memory import MemoryTransport
from swarm.net.transport import Contact, UnaryMethod
from swarm.state.transfer import SnapshotStore
from tests.support import MemoryWorld, eventually

SIZE = 24


@expert("test-shift", inputs=lambda config: [TensorSpec((None, SIZE))])
class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.theta


class _Run:
    """Hosts, a client whose requests go as `faults` say, and what was applied where."""

    def __init__(self, hosts: int, faults: list[str], kill_after: int | None) -> None:
        self.faults = list(faults)
        self.count = hosts
        self.kill_after = kill_after
        self.applied: Counter[int] = Counter()
        self.trained: dict[int, ExpertCall] = {}
        self.lost = 0
        self.thetas: list[Tensor] = []

    async def main(self, world: MemoryWorld) -> None:
        config = PeerConfig.preset("local", host={"device": "cpu", "placement_s": 0.3, "replica_sync_s": 0.5})
        trainer = await world.endpoint(config=config)
        grid = ExpertGrid("s.[0:1]", Shift, replicas=self.count, optimizer=OptimizerSpec("sgd", lr=1.0))
        endpoints = [await world.endpoint(config=config, bootstrap=[trainer.contact]) for _ in range(self.count)]
        hosts = [ExpertHost(e, {"s": grid}, SnapshotStore(e)) for e in endpoints]
        for host in hosts:
            await host.start()
            world.at_close(lambda host=host: host.close(drain=False))  # type: ignore[misc]
        client = ExpertClient(trainer, {"s": grid})
        await client.start()
        world.at_close(client.close)
        await eventually(lambda: all(host.held for host in hosts), 30.0)
        await eventually(lambda: len(client.directory.replicas("s.0")) == self.count, 30.0)
        assert isinstance(trainer.transport, MemoryTransport)
        self._break(trainer.transport)
        for first in range(0, SIZE, 4):
            if self.kill_after == first and self.count > 1:
                victim = endpoints[0].transport
                assert isinstance(victim, MemoryTransport)
                victim.kill(silent=True)
            await asyncio.gather(*(self._train(client, i) for i in range(first, first + 4)))
        await asyncio.sleep(60.0)  # until what was late has arrived
        self.lost = trainer.runtime.events.count(UpdateLost)
        living = hosts if self.kill_after is None or self.count == 1 else hosts[1:]
        self.thetas = [h.backend("s.0").parameters[0].detach().clone() for h in living if "s.0" in h.held]

    async def _train(self, client: ExpertClient, i: int) -> None:
        options = CallOptions("the layer")
        call = client.new_call("s.0", 1, [torch.zeros(1, SIZE)])
        await client.forward([call], options)
        if not call.answered:
            return
        gradient = torch.zeros(1, SIZE)
        gradient[0, i] = 1.0
        call.grad_outputs = [gradient]
        self.trained[i] = call
        await client.backward([call], options)

    @property
    def confirmed(self) -> set[int]:
        return {i for i, call in self.trained.items() if call.applied}

    def _break(self, transport: MemoryTransport) -> None:
        usual = transport.call

        async def call(to: Contact, method: UnaryMethod[Any, Any], request: Any, **how: Any) -> Any:
            fault = self.faults.pop(0) if method.path == CALL.path and self.faults else "none"
            if fault == "unreachable":
                raise PeerUnreachableError("Not sent.")
            if fault == "request_lost":
                raise CallTimeoutError("The request was lost.")
            answer = await usual(to, method, request, **how)
            if fault == "answer_lost":
                raise CallTimeoutError("The answer was lost.")
            if fault == "twice":
                return await usual(to, method, request, **how)
            if fault == "slow":
                await asyncio.sleep(2.0)
            return answer

        transport.call = call  # type: ignore[method-assign]

    def note(self, gradient: Gradient) -> None:
        [part] = gradient.parts
        assert part is not None
        for coordinate, value in enumerate(part.tolist()):
            if value:
                assert value == 1.0, "two of the same in one batch"
                self.applied[coordinate] += 1


_FAULTS = st.lists(
    st.sampled_from(["none", "none", "unreachable", "request_lost", "answer_lost", "twice", "slow"]), max_size=50
)


@settings(max_examples=6, deadline=None, derandomize=True)
@example(2, ["twice"] * 40, None, 1)
@example(3, ["answer_lost", "none"] * 20, 12, 1)
@given(st.integers(1, 3), _FAULTS, st.sampled_from([None, 4, 12]), st.integers(0, 1000))
def test_no_gradient_is_applied_twice_and_none_is_lost_unnoticed(
    hosts: int, faults: list[str], kill_after: int | None, seed: int
) -> None:
    run = _Run(hosts, faults, kill_after)
    usual = ExpertOptimizer.add

    def add(self: ExpertOptimizer, gradient: Gradient, tokens: int, requests: int) -> bool:
        run.note(gradient)
        return usual(self, gradient, tokens, requests)

    world = MemoryWorld(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertOptimizer, "add", add)
        try:
            world.run(lambda: run.main(world))
        finally:
            world.close()
    assert all(count == 1 for count in run.applied.values()), "applied twice"
    assert run.confirmed <= set(run.applied), "confirmed but not applied"
    assert len(run.trained) - len(run.confirmed) == run.lost, "lost unnoticed, or found again"
    if set(faults) <= {"none", "unreachable", "slow"} and (kill_after is None or hosts == 1):
        assert run.confirmed == set(run.trained) == set(run.applied), "nothing was ambiguous"
    for theta in run.thetas:
        assert torch.equal(theta, run.thetas[0]), "the replicas have not agreed"
        # a step weighs as much as its host's share of the samples that an agreement merges: never more than itself
        assert all(-1.0 <= value <= 0.0 for value in theta.tolist()), "counts twice"
        assert {i for i, value in enumerate(theta.tolist()) if value} <= set(run.applied)
        if kill_after is None:
            assert all(theta[i] < 0 for i in run.applied), "a step is in nobody's weights"
    if hosts == 1:
        sequential = torch.zeros(SIZE)
        sequential[sorted(run.applied)] = -1.0
        assert torch.equal(run.thetas[0], sequential)
