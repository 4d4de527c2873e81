"""The README's training example, run as it is written, with a host in the same process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swarm
from swarm.experts.spec import registered

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
INVITING = 'print("swarm join", run.invite(role="host", expires="7d"))\n'


class TinyModel(nn.Module):
    """[batch, 256] -> [batch, 5], through the layer it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.layer(x))


@pytest.mark.timeout(120)
def test_the_training_example(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert INVITING in example
    joining = 'swarm.join(run.invite(role="host", expires="7d"), role="host")'
    example = example.replace(INVITING, f"{INVITING}host = {joining}\n").replace(
        "run.close()", "held = dict(host.host.held)\nhost.close()\nrun.close()"
    )
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(128, 256, generator=generator), torch.randint(0, 5, (128,), generator=generator)
    data = torch.utils.data.TensorDataset(inputs, labels)
    namespace: dict[str, Any] = {"__name__": "readme", "MyLM": TinyModel, "data": data}
    try:
        exec(compile(example, "README.md", "exec"), namespace)
    finally:
        registered.pop("gated", None)
        for name in ("peer", "host", "run"):
            if name in namespace:
                namespace[name].close()
    assert "swarm join swarmi1" in capsys.readouterr().out
    assert torch.isfinite(namespace["loss"])
    assert len(namespace["held"]) == 16
    assert max(namespace["held"].values()) > 0  # the host applied gradients
    assert isinstance(namespace["moe"], swarm.MixtureOfExperts)
