"""Agreement of replicas without a network: merged weights, and each step once whoever dies and whenever."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import NonFiniteError, SchemaMismatchError
from swarm.experts.agreement import Agreement, AgreementHolder, AgreementId, Capture, agree, merged_weights

BASE = AgreementId()


def state(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=dtype)}


def captured(holder: bytes, weights: dict[str, Tensor], samples: int = 1, steps: int = 1, number: int = 1) -> Capture:
    return Capture(holder, number, BASE, samples, steps, weights)


def test_deltas_weigh_by_their_samples_and_versions_add_up() -> None:
    base = Agreement(BASE, state(1.0, 1.0), 10)
    found = agree(base, [captured(b"a", state(5.0, 1.0), 3, 2), captured(b"b", state(1.0, 9.0), 1, 4)], b"a")
    assert found is not None
    assert found.weights["w"].tolist() == [4.0, 3.0]
    assert (found.weight_version, found.contained) == (16, {b"a": 1, b"b": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_lone_contributor_is_taken_bit_for_bit(dtype: torch.dtype) -> None:
    own = {"w": torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)}
    idle = captured(b"b", state(*[7.0] * 100, dtype=dtype), samples=0, steps=0)
    merged = merged_weights(state(*[0.1] * 100, dtype=dtype), [captured(b"a", own), idle])
    assert torch.equal(merged["w"], own["w"])


def test_counters_are_not_averaged() -> None:
    sync = {"count": torch.tensor(1)}
    merged = merged_weights(
        sync, [captured(b"a", {"count": torch.tensor(5)}), captured(b"b", {"count": torch.tensor(4)})]
    )
    assert merged["count"].item() == 5


def test_without_steps_there_is_nothing_to_agree_about() -> None:
    base = Agreement(BASE, state(1.0), 3)
    assert AgreementHolder(b"a", base).capture(state(1.0)) is None
    assert agree(base, [], b"a") is None


@pytest.mark.parametrize(
    ("lie", "refused"),
    [
        (captured(b"b", state(1.0)), SchemaMismatchError),
        (captured(b"b", {"v": torch.zeros(2)}), SchemaMismatchError),
        (captured(b"b", state(1.0, 1.0, dtype=torch.float64)), SchemaMismatchError),
        (captured(b"b", state(1.0, float("nan"))), NonFiniteError),
        (captured(b"b", state(1.0, 1.0), samples=-1), SchemaMismatchError),
        (captured(b"b", state(1.0, 1.0), number=0), SchemaMismatchError),
        (captured(b"a", state(1.0, 1.0)), SchemaMismatchError),
    ],
)
def test_captures_that_cannot_be_are_refused(lie: Capture, refused: type[Exception]) -> None:
    with pytest.raises(refused):
        agree(Agreement(BASE, state(1.0, 1.0), 0), [captured(b"a", state(2.0, 2.0)), lie], b"a")


def test_a_refused_agreement_changes_nothing() -> None:
    holder = AgreementHolder(b"a", Agreement(BASE, state(0.0), 0))
    holder.made(1, 1)
    with pytest.raises(NonFiniteError):
        holder.adopt(Agreement(AgreementId(1, b"x"), state(float("inf")), 1), state(1.0))
    assert (holder.base.id, holder.steps, holder.weight_version) == (BASE, 1, 1)


def test_of_two_agreements_on_one_base_the_larger_wins_and_the_loss_is_told() -> None:
    holder = AgreementHolder(b"a", Agreement(BASE, state(0.0), 0))
    holder.made(2, 2)
    now = state(2.0)
    own = holder.capture(now)
    assert own is not None
    mine = agree(holder.base, [own], b"a")
    assert mine is not None
    first = holder.adopt(mine, now)
    assert first is not None
    assert (first.lost_steps, first.own_steps) == (0, 0)
    theirs = Agreement(AgreementId(5, b"b"), state(9.0), 5, {b"b": 1})
    second = holder.adopt(theirs, first.weights)
    assert second is not None
    assert second.lost_steps == 2
    assert second.weights["w"].tolist() == [9.0]
    assert holder.adopt(mine, second.weights) is None


def test_a_capture_handed_out_stays_as_it_is_so_that_a_late_result_costs_and_doubles_nothing() -> None:
    holder = AgreementHolder(b"a", Agreement(BASE, state(0.0), 0))
    holder.made(1, 1)
    first = holder.capture(state(1.0))
    holder.made(1, 1)
    again = holder.capture(state(2.0))
    assert first is again is not None
    one, other = agree(holder.base, [first], b"x"), agree(holder.base, [first], b"y")
    assert one is not None
    assert other is not None
    rebased = holder.adopt(one, state(2.0))
    assert rebased is not None
    late = holder.adopt(other, rebased.weights)
    assert late is not None
    assert (late.weights["w"].tolist(), late.weight_version, late.lost_steps) == ([2.0], 2, 0)


class _Replicas:
    """Holders whose every step adds 1 to a coordinate of its own. Deltas are summed, not averaged, so that each
    coordinate says exactly how often its step counts."""

    SIZE = 64

    def __init__(self, count: int) -> None:
        base = Agreement(BASE, {"w": torch.zeros(self.SIZE, dtype=torch.float64)}, 0)
        self.holders = [AgreementHolder(bytes([i]), base) for i in range(count)]
        self.now = [base.weights for _ in range(count)]
        self.alive = list(range(count))
        self.steps: list[tuple[int, int]] = []

    def step(self, i: int) -> None:
        if len(self.steps) < self.SIZE:
            weights = self.now[i]["w"].clone()
            weights[len(self.steps)] += 1
            self.now[i] = {"w": weights}
            self.holders[i].made(1, 1)
            self.steps.append((i, len(self.steps)))

    def adopt(self, i: int, found: Agreement, forks: bool = False) -> None:
        before = self.holders[i].weight_version
        rebased = self.holders[i].adopt(found, self.now[i])
        if rebased is not None:
            assert forks or rebased.lost_steps == 0
            assert rebased.weight_version >= before or rebased.own_steps
            self.now[i] = rebased.weights

    def round(self, coordinator: int, meanwhile: int | None, delivered: list[int], *, dies: bool) -> None:
        """One agreement of all that live: those behind catch up first; steps go on while captures travel."""
        newest = max((self.holders[i].base for i in self.alive), key=lambda base: base.id)
        for i in self.alive:
            self.adopt(i, newest)
        captures = [c for i in self.alive if (c := self.holders[i].capture(self.now[i])) is not None]
        if meanwhile in self.alive:
            self.step(meanwhile)
        if not captures:
            return
        total = newest.weights["w"] + sum(c.weights["w"] - newest.weights["w"] for c in captures)
        found = agree(newest, captures, bytes([coordinator]))
        assert found is not None
        found = Agreement(found.id, {"w": total}, found.weight_version, found.contained)
        for i in delivered:
            if i in self.alive:
                self.adopt(i, found)
        if dies and len(self.alive) > 1:
            self.alive.remove(coordinator)

    def blind_round(self, coordinator: int, seen: list[int]) -> None:
        """An agreement of a coordinator that knows of some holders only: others may agree beside it."""
        group = [i for i in self.alive if i in seen or i == coordinator]
        newest = max((self.holders[i].base for i in group), key=lambda base: base.id)
        for i in group:
            self.adopt(i, newest, forks=True)
        captures = [c for i in group if (c := self.holders[i].capture(self.now[i])) is not None]
        if captures:
            total = newest.weights["w"] + sum(c.weights["w"] - newest.weights["w"] for c in captures)
            found = agree(newest, captures, bytes([coordinator]))
            assert found is not None
            self.adopt(
                coordinator, Agreement(found.id, {"w": total}, found.weight_version, found.contained), forks=True
            )

    def check(self) -> None:
        for i in self.alive:
            assert set(self.now[i]["w"].tolist()) <= {0.0, 1.0}, "a step counts twice"
            assert int(self.now[i]["w"].sum()) == self.holders[i].weight_version
            mine = [index for by, index in self.steps if by == i]
            assert all(self.now[i]["w"][index] == 1 for index in mine), "a survivor has lost a step of its own"


_ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(
        st.just("round"), st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(0, 3), unique=True), st.booleans()
    ),
    st.tuples(st.just("death"), st.integers(0, 3)),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(2, 4), st.lists(_ACTIONS, max_size=40))
def test_each_step_counts_once_whoever_dies_and_whatever_is_not_delivered(
    count: int, actions: list[tuple[str, int, int, list[int], bool]]
) -> None:
    replicas = _Replicas(count)
    for name, who, *rest in actions:
        if who not in replicas.alive:
            continue
        if name == "step":
            replicas.step(who)
        elif name == "death" and len(replicas.alive) > 1:
            replicas.alive.remove(who)
        elif name == "round":
            meanwhile, delivered, dies = rest
            replicas.round(who, meanwhile, delivered, dies=dies)  # type: ignore[arg-type]
        replicas.check()
    everybody = list(replicas.alive)
    for _ in range(2):  # what was captured early comes with the first, what was done since with the second
        replicas.round(replicas.alive[0], None, everybody, dies=False)
    replicas.check()
    assert len({tuple(replicas.now[i]["w"].tolist()) for i in everybody}) == 1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(0, 3)),
            st.tuples(st.just("round"), st.integers(0, 3), st.lists(st.integers(0, 3), unique=True)),
        ),
        max_size=40,
    )
)
def test_coordinators_that_do_not_see_each_other_may_cost_steps_but_never_count_one_twice(
    actions: list[tuple[str, int, list[int]]],
) -> None:
    replicas = _Replicas(4)
    for name, who, *rest in actions:
        if name == "step":
            replicas.step(who)
        else:
            replicas.blind_round(who, rest[0])
        for now in replicas.now:
            assert set(now["w"].tolist()) <= {0.0, 1.0}, "a step counts twice"
    for _ in range(3):
        for i in range(4):
            replicas.blind_round(i, [0, 1, 2, 3])
    assert len({tuple(now["w"].tolist()) for now in replicas.now}) == 1
