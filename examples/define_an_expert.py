"""Define an expert, host it in other processes, and train through it from this one.

    python examples/define_an_expert.py

The two lines that differ between machines: `swarm.LocalSwarm` starts hosts on this machine; across the internet, hosts
run `swarm join INVITE --import define_an_expert.py` and the trainer calls `swarm.join(INVITE, role="trainer")`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import swarm

HID = 32


def inputs(config: dict[str, Any]) -> list[swarm.TensorSpec]:
    return [swarm.TensorSpec((None, config["hid"]))]  # None: any number of tokens


@swarm.expert("gated", inputs=inputs)
class Gated(nn.Module):
    """A gated feed-forward block. Hosts build it from the grid's config and train it with the grid's optimizer."""

    def __init__(self, hid: int = 256) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hid, 2 * hid), nn.Linear(hid, 2 * hid)
        self.down = nn.Linear(2 * hid, hid)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hid] -> [tokens, hid]
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Model(nn.Module):
    """A small regression model: its mixture layer lives on the hosts, the rest here."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe
        self.head = nn.Linear(HID, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x + self.moe(x))
        return result


def main() -> None:
    torch.manual_seed(0)
    grid = swarm.ExpertGrid(
        "gated.[0:2].[0:2]", Gated, config={"hid": HID}, optimizer=swarm.OptimizerSpec("adamw", lr=3e-3)
    )
    with swarm.LocalSwarm(experts=[grid], hosts=2) as local, local.peer(role="trainer") as peer:
        peer.wait_for_experts("gated", timeout_s=60)
        moe = swarm.MixtureOfExperts(peer, "gated", dim=HID, k=2)
        model = Model(moe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(61):
            x = torch.randn(64, HID)
            y = (x[:, :1] * x[:, 1:2]).sin()  # not linear: the head alone cannot learn it
            loss = F.mse_loss(model(x), y) + moe.aux_loss()
            optimizer.zero_grad()
            loss.backward()  # trains the experts on their hosts, too
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step:3d}  loss {loss.item():.4f}")
        calls = moe.stats
        print(
            f"{calls.calls} expert calls, {calls.failed_calls} failed; tokens per expert: {dict(calls.expert_tokens)}"
        )


if __name__ == "__main__":
    main()
