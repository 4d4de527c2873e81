"""Attached training with push-sum: rounds on a copy in the background, and mass that is handed over at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from swarm.averaging.gossip import PushSum
from swarm.averaging.pushing import PushSeat
from swarm.averaging.rounds import MassHandedOver, MassLost, Pushed
from swarm.training import ParameterAveraging
from swarm.training.attach import Attachment, attach
from tests.unit.training.conftest import Trainer

Make = Callable[[int], list[Trainer]]
OPTIMA = (torch.tensor([4.0, -2.0, 1.0]), torch.tensor([-2.0, 0.0, 1.0]))


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def seat_of(attachment: Attachment) -> PushSeat:
    assert isinstance(attachment._averager._seat, PushSeat)
    return attachment._averager._seat


def wait_for(attachment: Attachment) -> None:
    """Until its last round is over and its shares have arrived: the toy's steps are faster than any of that."""
    if attachment._handle is not None:
        attachment._handle.result(10.0)
    end = time.monotonic() + 10.0
    while seat_of(attachment).ledger.open and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("overlap", [False, True])
def test_trainers_with_different_optima_reach_the_mean_one(trainers: Make, overlap: bool) -> None:
    peers = trainers(2)
    models = [Point(), Point()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    averaging = ParameterAveraging(every=1, strategy=PushSum(), overlap=overlap)
    attachments = [attach(m, o, p, averaging) for m, o, p in zip(models, optimizers, peers, strict=True)]
    for step in range(60):
        for model, optimizer, optimum, attachment in zip(models, optimizers, OPTIMA, attachments, strict=True):
            wait_for(attachment)
            optimizer.param_groups[0]["lr"] = 1 / (5 + step)
            optimizer.zero_grad()
            (0.5 * (model.at - optimum).square().sum()).backward()
            optimizer.step()
    for attachment in attachments:
        assert attachment.stats.outcomes["Pushed"] > 50
        assert isinstance(attachment.stats.last.outcome, Pushed)  # type: ignore[union-attr]
    mean = (OPTIMA[0] + OPTIMA[1]).double() / 2
    apart = float((OPTIMA[0] - OPTIMA[1]).norm())
    for model in models:
        assert float((model.at.detach() - mean).norm()) < 0.15 * apart
        assert float(model.at[2].detach()) > 0.7, "alone 0.94; 0.5 if steps undid training"
    first, second = attachments
    first.close()
    assert peers[0].events.count(MassHandedOver) == 1
    assert seat_of(second).held == pytest.approx(2.0, abs=1e-9)
    second.close()
    assert peers[1].events.count(MassLost) == 1
