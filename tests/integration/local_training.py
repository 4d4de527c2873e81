"""What trainer processes do in the tests of local swarms."""

import json
import threading
from pathlib import Path
from typing import Any


def one_step(peer: Any, file: str) -> None:
    """Train one step through remote experts and leave what happened in a file."""
    import torch

    import swarm

    peer.wait_for_experts("ffn", timeout_s=60)
    moe = swarm.MixtureOfExperts(peer, "ffn", dim=8)
    loss = moe(torch.randn(16, 8, requires_grad=True)).square().mean()
    loss.backward()
    Path(file).write_text(json.dumps({"loss": loss.item(), "name": peer.name}), "utf-8")


def forever(peer: Any) -> None:
    """Train until told to leave."""
    threading.Event().wait()


def broken(peer: Any) -> None:
    raise ValueError("this training function is broken")
