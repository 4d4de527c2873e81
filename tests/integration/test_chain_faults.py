"""A network larger than one machine: a chain of experts in real processes, one of which is killed in mid-backward."""

import pytest
import torch

import swarm
from swarm.simulation.pytest_plugin import LocalSwarmFactory

pytestmark = pytest.mark.timeout(150)  # processes start slowly where cores are busy
HID, SEQ = 8, 6
GRID = swarm.ExpertGrid(
    "block.[0:4]",
    "causal_transformer",
    config={"hid": HID, "seq": SEQ},
    replicas=2,
    optimizer=swarm.OptimizerSpec("adamw", lr=3e-3),
)


def test_training_goes_on_when_a_stage_s_host_is_killed_in_mid_backward(
    local_swarm: LocalSwarmFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(16, SEQ, HID), torch.randn(16, SEQ, HID)
    with local_swarm([GRID], hosts=3) as s:
        s.wait_until(lambda view: view.min_replicas("block") == 2)
        names = {s.peer_id(name): name for name in ("host-0", "host-1", "host-2")}
        with s.peer(role="trainer") as peer:
            peer.wait_for_experts("block", timeout_s=30)
            chain = swarm.RemoteSequential(peer, "block", microbatches=2)
            inlet = torch.nn.Linear(HID, HID)
            optimizer = torch.optim.Adam(inlet.parameters(), lr=3e-3)
            killed: list[str] = []
            backward = peer.experts.backward

            async def kill_first(calls, options):  # type: ignore[no-untyped-def]
                """When the gradient arrives at stage 1, its host dies before it is asked; stage 3 is through."""
                if len(losses) == 5 and not killed and calls[0].uid == "block.1":
                    killed.append(names[str(calls[0].contact.peer_id)])
                    s.kill(killed[0])
                await backward(calls, options)

            monkeypatch.setattr(peer.experts, "backward", kill_first)
            losses: list[float] = []
            for _ in range(15):
                optimizer.zero_grad()
                loss = (chain(inlet(x)) - target).square().mean()
                loss.backward()
                assert inlet.weight.grad is not None
                assert inlet.weight.grad.abs().sum() > 0
                optimizer.step()
                losses.append(loss.item())
            stats = chain.stats
        for name in sorted({*names.values()} - {*killed}):
            s.kill(name)  # nobody needs to hand anything over
    assert len(killed) == 1
    assert stats.missing_gradients == 0
    assert stats.failed_calls >= 1
    assert losses[-1] < min(losses[:6]) * 0.98
