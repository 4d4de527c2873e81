"""Attached training against references: averages, late joiners, and the contract of a torch optimizer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.gossip import Gossip
from swarm.averaging.rounds import Alone, Group, Round, RoundFinished
from swarm.errors import SchemaMismatchError, UsageError
from swarm.state.snapshot import Snapshot
from swarm.training import ParameterAveraging, seeded
from swarm.training.attach import Attachment, attach
from swarm.training.state import DonorPassedOver, StateLoaded, StateNotLoaded, build_snapshot, load_snapshot, state_key
from tests.support import GrpcWorld
from tests.unit.training.conftest import Trainer

Make = Callable[[int], list[Trainer]]
BLOCKING = ParameterAveraging(every=1, overlap=False)


def model_of(peer: Trainer) -> nn.Module:
    with seeded(peer):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x, y = batch_of(rank, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run training loops at the same time, each on a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result(timeout=40) for f in [pool.submit(job) for job in jobs]]


def test_blocking_rounds_equal_the_averaged_reference(trainers: Make) -> None:
    peers, steps = trainers(2), 4
    models = [model_of(p) for p in peers]
    references = [model_of(p) for p in peers]
    assert torch.equal(vector(models[0]), vector(models[1]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    attachments = [attach(m, o, p, BLOCKING) for m, o, p in zip(models, optimizers, peers, strict=True)]

    def loop(rank: int) -> None:
        for step in range(steps):
            train_step(models[rank], optimizers[rank], rank, step)

    together([lambda: loop(0), lambda: loop(1)])
    own = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in references]
    for step in range(steps):
        for rank in range(2):
            train_step(references[rank], own[rank], rank, step)
        with torch.no_grad():
            for a, b in zip(references[0].parameters(), references[1].parameters(), strict=True):
                mean = (a + b) / 2
                a.copy_(mean)
                b.copy_(mean)
    assert torch.equal(vector(models[0]), vector(models[1]))
    torch.testing.assert_close(vector(models[0]), vector(references[0]), rtol=1e-6, atol=1e-6)
    for attachment in attachments:
        assert attachment.step == steps
        assert attachment.stats.rounds == steps
        assert attachment.stats.outcomes == {"Group": steps}
        assert isinstance(attachment.stats.last.outcome, Group)  # type: ignore[union-attr]
        attachment.close()
    assert attachments[0].synced_from is None


@pytest.mark.parametrize("strategy", [AllReduce(), Gossip()])
def test_overlapped_rounds_add_what_they_changed_and_keep_local_progress(
    trainers: Make, strategy: AllReduce | Gossip
) -> None:
    peers = trainers(2)
    seen: dict[int, list[tuple[Round, Tensor, Tensor]]] = {0: [], 1: []}
    models = [model_of(p) for p in peers]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
    averaging = ParameterAveraging(every=1, strategy=strategy)
    attachments = [
        attach(
            models[r],
            optimizers[r],
            peers[r],
            averaging,
            on_round=lambda o, b, a, r=r: seen[r].append((o, b, a)),  # type: ignore[misc]
        )
        for r in range(2)
    ]

    def loop(rank: int) -> Tensor:
        train_step(models[rank], optimizers[rank], rank, 0)
        attachment, begun = attachments[rank], vector(models[rank]).clone()
        attachment.pause()
        train_step(models[rank], optimizers[rank], rank, 1)
        progress = vector(models[rank]) - begun if not seen[rank] else None
        assert attachment._handle is None or attachment._handle.result(20).averaged
        attachment.close()
        assert progress is None or torch.allclose(
            vector(models[rank]), seen[rank][0][2] + progress, rtol=1e-5, atol=1e-6
        )
        return begun

    begun = together([lambda: loop(0), lambda: loop(1)])
    for rank in range(2):
        ((outcome, before, after),) = seen[rank]
        assert outcome.averaged
        assert torch.equal(before, begun[rank])
        torch.testing.assert_close(after, (begun[0] + begun[1]) / 2, rtol=1e-6, atol=1e-6)
        assert not torch.equal(before, after)
    assert torch.equal(seen[0][0][2], seen[1][0][2])


def test_a_late_trainer_begins_with_the_newest_state(trainers: Make) -> None:
    (first,) = trainers(1)
    model = model_of(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach(model, optimizer, first, BLOCKING) as attachment:
        for step in range(3):
            train_step(model, optimizer, 0, step)
        assert attachment.stats.outcomes == {"Alone": 3}
        assert isinstance(attachment.stats.last.outcome, Alone)  # type: ignore[union-attr]
        wait_for_record(first, 3)
        (late,) = trainers(1)
        fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        its_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
        with attach(fresh, its_optimizer, late, ParameterAveraging(every=100)) as joined:
            assert joined.synced_from == str(first.endpoint.peer_id)
            assert joined.step == 3
            assert torch.equal(vector(fresh), vector(model))
            assert late.events.count(StateLoaded) == 1
            train_step(model, optimizer, 0, 9)
            train_step(fresh, its_optimizer, 0, 9)
            for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
                for key, value in optimizer.state[a].items():
                    assert torch.equal(value, its_optimizer.state[b][key]), key
            assert torch.equal(vector(fresh), vector(model))
    assert first.state.keys() == []


def wait_for_record(peer: Trainer, step: int) -> None:
    """Until the state of this step is announced."""
    import asyncio

    async def poll() -> None:
        while True:
            entries = await peer.endpoint.dht.get(state_key("trunk"), fresh=True)
            if any(e.body["step"] == step for e in entries):
                return
            await asyncio.sleep(0.02)

    peer.endpoint.run_sync(poll(), timeout_s=10)


def test_state_of_another_model_is_refused_and_changes_nothing(trainers: Make) -> None:
    (first,) = trainers(1)
    model = model_of(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, first, BLOCKING):
        train_step(model, optimizer, 0, 0)
        wait_for_record(first, 1)
        (late,) = trainers(1)
        for other in (nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))):
            before = vector(other).clone()
            with pytest.raises(SchemaMismatchError):
                attach(other, torch.optim.SGD(other.parameters(), lr=0.1), late, BLOCKING)
            assert torch.equal(vector(other), before)


@pytest.mark.parametrize("other", ["model", "optimizer"])
def test_a_donor_of_another_schema_does_not_keep_joiners_from_the_next(
    trainers: Make, grpc_world: GrpcWorld, other: str
) -> None:
    first, stranger, late = trainers(3)
    odd = nn.Linear(3, 5) if other == "model" else model_of(first)
    its = torch.optim.SGD(odd.parameters(), lr=0.1, momentum=0.9)
    odd(torch.ones(1, 3)).sum().backward()
    its.step()
    stranger.state.publish(state_key("trunk"), build_snapshot(odd, its, 1000))

    async def announce() -> None:
        body = {"addresses": list(stranger.endpoint.contact.addresses), "step": 1000}
        for subkey in ("", *(str(i) for i in range(20))):
            await stranger.endpoint.dht.put(state_key("trunk"), body, ttl_s=30, subkey=subkey)

    with attach(model := model_of(first), torch.optim.SGD(model.parameters(), lr=0.1), first, BLOCKING):
        wait_for_record(first, 0)
        grpc_world.run(announce)
        fresh = model_of(late)
        with attach(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), late, BLOCKING) as joined:
            assert joined.synced_from == str(first.endpoint.peer_id)
            assert torch.equal(vector(fresh), vector(model))
        (event,) = late.events.recent(DonorPassedOver)
        assert event.event.donor == str(stranger.endpoint.peer_id)  # type: ignore[attr-defined]


def test_a_donor_that_is_gone_is_an_event_and_training_begins_anyway(trainers: Make, grpc_world: GrpcWorld) -> None:
    first, late = trainers(2)

    async def lie() -> None:
        await first.endpoint.dht.put(state_key("trunk"), {"addresses": ["127.0.0.1:1"], "step": 5}, ttl_s=30)

    grpc_world.run(lie)
    model = model_of(late)
    with attach(model, torch.optim.SGD(model.parameters(), lr=0.1), late, BLOCKING) as attachment:
        assert attachment.synced_from is None
        assert attachment.step == 0
        (event,) = late.events.recent(StateNotLoaded)
        assert first.endpoint.peer_id.short in event.event.reason  # type: ignore[attr-defined]


def test_trainers_begin_with_the_weights_of_the_first(trainers: Make) -> None:
    first, second = trainers(2)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with attach(model, torch.optim.SGD(model.parameters(), lr=0.1), first, BLOCKING):
        wait_for_record(first, 0)
        with attach(other, torch.optim.SGD(other.parameters(), lr=0.1), second, BLOCKING) as joined:
            assert joined.synced_from == str(first.endpoint.peer_id)
            assert joined.step == 0
            assert torch.equal(vector(other), vector(model))


def test_state_with_nan_is_passed_over(trainers: Make) -> None:
    first, late = trainers(2)
    broken = model_of(first)
    optimizer = torch.optim.SGD(broken.parameters(), lr=0.1)
    with torch.no_grad():
        next(broken.parameters()).view(-1)[0] = float("nan")
    with attach(broken, optimizer, first, BLOCKING):
        wait_for_record(first, 0)
        model = model_of(late)
        before = vector(model).clone()
        with attach(model, torch.optim.SGD(model.parameters(), lr=0.1), late, BLOCKING) as attachment:
            assert attachment.synced_from is None
            assert torch.equal(vector(model), before)
        (event,) = late.events.recent(StateNotLoaded)
        assert "NaN" in event.event.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["size", "type", "plain", "another optimizer's"])
def test_optimizer_state_that_does_not_fit_changes_nothing(trainers: Make, change: str) -> None:
    [donor] = trainers(1)
    given, model = model_of(donor), model_of(donor)
    with torch.no_grad():
        next(given.parameters()).add_(1.0)
    theirs, optimizer = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (given, model))
    train_step(given, theirs, 0, 0)
    good = build_snapshot(given, theirs, 7)
    tensors, metadata = dict(good.tensors), dict(good.metadata)
    if change == "size":
        tensors["optim/0.weight/exp_avg"] = torch.zeros(5)
    elif change == "type":
        tensors["optim/0.weight/exp_avg"] = tensors["optim/0.weight/exp_avg"].long()
    elif change == "plain":
        metadata["optimizer"] = {"0.weight": {"step": 3}}
    else:
        tensors["optim/0.weight/momentum_buffer"] = torch.zeros(4, 3)
    before = vector(model).clone()
    with pytest.raises(SchemaMismatchError):
        load_snapshot(Snapshot.build(tensors, metadata), model, optimizer)
    assert torch.equal(vector(model), before)
    assert not optimizer.state
    assert load_snapshot(good, model, optimizer) == 7
    train_step(model, optimizer, 0, 1)


# The contract of a torch optimizer ----------------------------------------------------------------------------------


@pytest.fixture
def alone(trainers: Make) -> Trainer:
    return trainers(1)[0]


RARE = ParameterAveraging(every=1000)


def attached(peer: Trainer, name: str = "AdamW", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Attachment]:
    model = model_of(peer)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    return model, optimizer, attach(model, optimizer, peer, **options)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"])
def test_an_attached_optimizer_is_the_plain_one(alone: Trainer, name: str) -> None:
    model, optimizer, attachment = attached(alone, name, averaging=RARE)
    plain_model = model_of(alone)
    plain = getattr(torch.optim, name)(plain_model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
    groups = optimizer.param_groups
    with attachment:
        for step in range(4):
            train_step(model, optimizer, 0, step)
            train_step(plain_model, plain, 0, step)
            schedule.step()
            plain_schedule.step()
        assert attachment.step == 4
    assert optimizer.param_groups is groups
    assert groups[0]["lr"] == plain.param_groups[0]["lr"] < 0.01
    assert torch.equal(vector(model), vector(plain_model))
    mine, theirs = optimizer.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    assert mine["param_groups"] == theirs["param_groups"]
    assert all(mine["state"][i].keys() == theirs["state"][i].keys() for i in theirs["state"])
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    pickle.loads(pickle.dumps(optimizer))


def test_step_runs_the_closure_once_and_returns_its_loss(alone: Trainer) -> None:
    model, optimizer, attachment = attached(alone, "SGD", averaging=BLOCKING)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch_of(0, 0)[0]), batch_of(0, 0)[1])
        loss.backward()
        return loss

    with attachment:
        expected = closure().item()
        calls.clear()
        assert optimizer.step(closure).item() == expected  # type: ignore[attr-defined]
    assert calls == [1]
    assert attachment.step == 1


def test_steps_without_gradients_or_without_a_rate_do_no_networking(alone: Trainer) -> None:
    model, optimizer, attachment = attached(alone, "SGD", averaging=BLOCKING)
    with attachment:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
        train_step(model, optimizer, 0, 0)
        assert attachment.step == 0
        assert alone.events.count(RoundFinished) == 0
        optimizer.param_groups[0]["lr"] = 0.1
        train_step(model, optimizer, 0, 0)
        assert attachment.step == 1
        assert alone.events.count(RoundFinished) == 1


def test_a_step_that_a_gradient_scaler_skips_does_not_count(alone: Trainer) -> None:
    model, optimizer, attachment = attached(alone, "SGD", averaging=BLOCKING)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attachment:
        for step, poison in enumerate([False, True, False]):
            x, y = batch_of(0, step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss * (float("inf") if poison else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert attachment.step == 2
        assert attachment.stats.rounds == 2
    assert bool(torch.isfinite(vector(model)).all())


def test_parameters_are_written_in_place_and_frozen_ones_stay(trainers: Make) -> None:
    peers = trainers(2)
    models = [model_of(p) for p in peers]
    for model in models:
        model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in models]
    addresses = [[p.data_ptr() for p in m.parameters()] for m in models]
    frozen = models[0][0].weight.clone()  # type: ignore[index, operator]
    attachments = [attach(m, o, p, BLOCKING) for m, o, p in zip(models, optimizers, peers, strict=True)]
    together([lambda r=r: train_step(models[r], optimizers[r], r, 0) for r in range(2)])  # type: ignore[misc]
    for rank in range(2):
        assert [p.data_ptr() for p in models[rank].parameters()] == addresses[rank]
        assert torch.equal(models[rank][0].weight, frozen)  # type: ignore[index]
        attachments[rank].close()
    assert torch.equal(vector(models[0]), vector(models[1]))


def test_pause_keeps_local_steps_and_close_ends_hooks(alone: Trainer) -> None:
    model, optimizer, attachment = attached(alone, "SGD", averaging=BLOCKING)
    attachment.pause()
    train_step(model, optimizer, 0, 0)
    assert (attachment.step, attachment.stats.rounds) == (1, 0)
    attachment.resume()
    train_step(model, optimizer, 0, 1)
    assert (attachment.step, attachment.stats.rounds) == (2, 1)
    attachment.close()
    attachment.close()
    train_step(model, optimizer, 0, 2)
    assert (attachment.step, attachment.stats.rounds) == (2, 1)
    assert alone.state.keys() == []


def test_leaving_by_an_error_does_not_wait_for_the_round(alone: Trainer) -> None:
    model, optimizer, attachment = attached(alone, "SGD", averaging=ParameterAveraging(every=1))

    class Stop(Exception):
        pass

    with pytest.raises(Stop), attachment:  # noqa: PT012 - the round must be running when it raises
        train_step(model, optimizer, 0, 0)
        raise Stop
    assert attachment.stats.rounds == 0


def test_models_that_cannot_be_averaged_are_refused(alone: Trainer) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UsageError):
        attach(frozen, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), alone)
    with pytest.raises(UsageError):
        ParameterAveraging(every=0)
    _, _, attachment = attached(alone, "SGD")
    with pytest.raises(UsageError):
        attached(alone, "SGD")
    attachment.close()


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        (lambda m, o: (o, m), {}, "module first"),
        (lambda m, o: (m, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)), {}, "model.parameters"),
        (lambda m, o: (m, o), {"averaging": AllReduce()}, "ParameterAveraging"),
    ],
)
def test_arguments_that_were_mixed_up_are_named(arguments: Any, options: dict[str, Any], why: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError) as raised:
        attach(*arguments(model, torch.optim.SGD(model.parameters(), lr=0.1)), None, **options)  # type: ignore[arg-type]
    assert why in str(raised.value.fix)
