"""Trainers that end a round with other values than their group: who is repaired, from whom, and who is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.averaging.reducing import PartServer
from swarm.averaging.rounds import ResultsDiverged
from swarm.identity import PeerId
from swarm.training import ParameterAveraging
from swarm.training import repair as repairing
from swarm.training.attach import Attachment, attach
from swarm.training.repair import RepairFailure, StateNotRepaired, StateRepaired, _move, average_key
from tests.unit.training.conftest import Trainer
from tests.unit.training.test_attach import Make, model_of, together, train_step, vector

BLOCKING = ParameterAveraging(every=1, overlap=False, prepare=False)


class Forged:
    """A stream to a victim on which one byte of every average is another."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, payload: bytes) -> None:
        if len(payload) >= 4:
            payload = bytes([payload[0] ^ 0x20]) + payload[1:]
        await self._stream.send(payload)


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer, Trainer], None]:
    """Lets the reducer of one trainer give another one false averages, in one round."""

    def start(liar: Trainer, victim: Trainer) -> None:
        original, left = PartServer._write_averages, [1]

        async def write(self: PartServer, peer: PeerId, stream: Any) -> None:
            lies = self._shared.me == liar.endpoint.peer_id and peer == victim.endpoint.peer_id and left[0]
            if lies:
                left[0] -= 1
                stream = AveragesForged(stream)
            await original(self, peer, stream)

        monkeypatch.setattr(PartServer, "_write_averages", write)

    return start


class AveragesForged(Forged):
    """Forges averages and leaves the summary at the end of the exchange alone."""

    async def send(self, payload: bytes) -> None:
        if payload[:2] in (b"\x02w", b"\x02i"):
            await self._stream.send(payload)
        else:
            await super().send(payload)


class Run:
    """Attached trainers that step together."""

    def __init__(self, peers: list[Trainer], averaging: ParameterAveraging = BLOCKING) -> None:
        self.peers = peers
        self.models: list[nn.Module] = [model_of(p) for p in peers]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        self.attached: list[Attachment] = [
            attach(m, o, p, averaging) for m, o, p in zip(self.models, self.optimizers, peers, strict=True)
        ]
        self.steps = 0

    def step(self, *ranks: int) -> list[Tensor]:
        chosen = ranks or tuple(range(len(self.peers)))
        together(
            [lambda r=r: train_step(self.models[r], self.optimizers[r], r, self.steps) for r in chosen]  # type: ignore[misc]
        )
        self.steps += 1
        return [vector(model).clone() for model in self.models]

    def close(self) -> None:
        for attachment in self.attached:
            attachment.close()


def events(peer: Trainer, kind: type) -> list[Any]:
    return [record.event for record in peer.events.recent(kind)]


def test_who_was_given_false_averages_takes_those_of_the_majority(
    trainers: Make, forge: Callable[[Trainer, Trainer], None]
) -> None:
    run = Run(trainers(3))
    liar, witness, victim = run.peers
    forge(liar, victim)
    values = run.step()
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[2], values[1])
    (repaired,) = events(victim, StateRepaired)
    assert repaired.donor in [str(p.endpoint.peer_id) for p in (liar, witness)]
    assert repaired.round == run.attached[2].stats.last.outcome.nonce  # type: ignore[union-attr]
    assert repaired.nbytes > 0
    assert run.attached[2].stats.last.diverged  # type: ignore[union-attr]
    for peer in run.peers:
        (told,) = events(peer, ResultsDiverged)
        assert told.others == (str(victim.endpoint.peer_id),)
        assert events(peer, StateNotRepaired) == []
    assert events(witness, StateRepaired) == []
    again = run.step()
    assert torch.equal(again[0], again[1])
    assert torch.equal(again[2], again[1])
    assert len(events(victim, StateRepaired)) == 1
    run.close()
    assert all(peer.state.keys() == [] for peer in run.peers)


def test_one_against_one_nobody_is_repaired_and_both_are_told(
    trainers: Make, forge: Callable[[Trainer, Trainer], None]
) -> None:
    run = Run(trainers(2))
    forge(*run.peers)
    values = run.step()
    assert not torch.equal(values[0], values[1])
    for peer in run.peers:
        (told,) = events(peer, StateNotRepaired)
        assert told.failure is RepairFailure.NO_MAJORITY
        assert events(peer, StateRepaired) == []
    again = run.step()
    assert torch.equal(again[0], again[1])
    run.close()


@pytest.mark.parametrize("next_round", ["comes", "has no group"])
def test_a_round_that_comes_first_repairs_and_one_without_a_group_does_not(
    trainers: Make,
    forge: Callable[[Trainer, Trainer], None],
    monkeypatch: pytest.MonkeyPatch,
    next_round: str,
) -> None:
    original, held = repairing.find_agreed, asyncio.Event()

    async def later(*args: Any) -> Any:
        await held.wait()
        return await original(*args)

    monkeypatch.setattr(repairing, "find_agreed", later)
    waited: list[float] = []
    monkeypatch.setattr(repairing.Repair, "wait", lambda self, timeout_s: waited.append(timeout_s))
    run = Run(trainers(3))
    forge(run.peers[0], run.peers[2])
    run.step()
    victim = run.peers[2]
    assert waited == [victim.endpoint.config.averaging.round_timeout_s]
    assert run.attached[2]._repair is not None
    if next_round == "comes":
        values = run.step()
        assert torch.equal(values[2], values[0])
        (repaired,) = events(victim, StateRepaired)
        assert repaired.donor == ""
        assert repaired.nbytes == 0
    else:
        before = vector(run.models[0]).clone()
        run.step(2)
        assert run.attached[2].stats.outcomes == {"Group": 1, "TooFew": 1}
        repair = run.attached[2]._repair
        assert repair is not None
        progressed = vector(run.models[2]).clone()
        ours = torch.cat([t.reshape(-1) for t in repair._ours.tensors.values()])
        victim.endpoint.run_sync(_set(held))
        assert repair._future.exception(20) is None
        run.attached[2].pause()
        lone = vector(run.models[2]).clone()
        run.attached[2]._apply_repair(repair)
        torch.testing.assert_close(vector(run.models[2]), before + (lone - ours), rtol=1e-6, atol=1e-6)
        assert torch.equal(lone, progressed)
        assert len(events(victim, StateRepaired)) == 1
    run.close()


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_overlapped_rounds_are_repaired_between_steps_and_keep_progress(
    trainers: Make, forge: Callable[[Trainer, Trainer], None]
) -> None:
    run = Run(trainers(3), ParameterAveraging(every=1, prepare=False))
    forge(run.peers[0], run.peers[2])
    run.step()
    handles = [attachment._handle for attachment in run.attached]
    for attachment, handle in zip(run.attached, handles, strict=True):
        assert handle is not None
        handle.result(20)
        attachment.pause()
    averages = run.attached[0]._averager.vector.flat().clone()
    run.step()
    assert run.attached[2].stats.last.diverged  # type: ignore[union-attr]
    repair = run.attached[2]._repair
    assert repair is not None or events(run.peers[2], StateRepaired)
    if repair is not None:
        assert repair._future.exception(20) is None
    held = torch.cat([t.reshape(-1) for t in repair._ours.tensors.values()]) if repair is not None else None
    run.step(2)
    assert len(events(run.peers[2], StateRepaired)) == 1
    assert held is not None
    assert not torch.equal(held, averages)
    offered = run.peers[2].state.get(average_key("trunk"))
    assert offered is not None
    assert torch.equal(torch.cat([t.reshape(-1) for t in offered.tensors.values()]), averages)
    run.close()


def test_values_that_did_not_move_become_exactly_the_others_and_progress_stays() -> None:
    ours, theirs = torch.tensor([1.0, 1e8, 0.1]), torch.tensor([0.3, 0.7, 0.9])
    tensor = ours.clone()
    tensor[2] += 0.25
    _move(tensor, ours, theirs)
    assert torch.equal(tensor[:2], theirs[:2])
    torch.testing.assert_close(tensor[2], torch.tensor(1.15))


def test_a_repair_that_is_not_done_when_training_ends_is_told(
    trainers: Make, forge: Callable[[Trainer, Trainer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(repairing, "find_agreed", never)
    monkeypatch.setattr(repairing.Repair, "wait", lambda self, timeout_s: None)
    run = Run(trainers(3))
    forge(run.peers[0], run.peers[2])
    run.step()
    run.close()
    (told,) = events(run.peers[2], StateNotRepaired)
    assert told.failure is RepairFailure.ENDED
