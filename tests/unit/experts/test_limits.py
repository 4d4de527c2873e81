"""What one caller may take of a host."""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress

import pytest

from swarm.errors import HostBusyError
from swarm.experts.limits import GradientLimits, InflightBudget
from swarm.identity import PeerId

ONE, TWO, THREE = (PeerId(bytes([n]) * 32) for n in range(1, 4))


def test_one_peer_may_hold_everything_while_nobody_else_holds_anything() -> None:
    budget = InflightBudget(100)
    with budget.hold(ONE) as admit:
        admit(60)
        with budget.hold(ONE) as again:
            again(40)
            with pytest.raises(HostBusyError):
                again(1)
        assert budget.held_bytes == 60
    assert budget.held_bytes == 0


def test_an_idle_host_takes_a_request_of_any_size_and_others_still_find_half() -> None:
    budget = InflightBudget(100)
    with budget.hold(ONE) as huge, budget.hold(TWO) as admit:
        huge(1000)
        admit(50)
        with pytest.raises(HostBusyError, match="50 of them yours"):
            admit(1)
        with pytest.raises(HostBusyError):
            huge(1)
    with budget.hold(TWO) as admit:
        admit(100)


def test_beside_others_a_peer_holds_at_most_half() -> None:
    budget = InflightBudget(100)
    with budget.hold(TWO) as small, budget.hold(ONE) as admit:
        small(1)
        with pytest.raises(HostBusyError):
            admit(51)
        admit(50)
        with budget.hold(THREE) as third:
            third(49)
            with pytest.raises(HostBusyError):
                small(1)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_held_is_bounded_and_released(seed: int) -> None:
    rng = random.Random(seed)
    budget = InflightBudget(100)
    for _ in range(50):
        with ExitStack() as stack:
            for _ in range(30):
                admit = stack.enter_context(budget.hold(rng.choice((ONE, TWO, THREE))))
                with suppress(HostBusyError):
                    admit(rng.randint(0, 60))
                assert budget.held_bytes <= 150
        assert budget.held_bytes == 0


def test_a_trainer_alone_is_not_limited() -> None:
    limits = GradientLimits(10.0)
    assert [limits.factor(ONE, 16, norm) for norm in (1.0, 1e9, 0.0, 1e-9)] == [1.0] * 4


def test_a_liar_is_scaled_down_to_a_multiple_of_the_median() -> None:
    limits = GradientLimits(10.0)
    rng = random.Random(0)
    for _ in range(20):
        for honest in (ONE, TWO):
            assert limits.factor(honest, 16, rng.uniform(0.5, 2.0)) == 1.0
    for _ in range(50):
        norm = 1e6
        limited = norm * limits.factor(THREE, 16, norm)
        assert 5.0 <= limited <= 20.0
        for honest in (ONE, TWO):
            assert limits.factor(honest, 16, rng.uniform(0.5, 2.0)) == 1.0


def test_of_two_trainers_the_smaller_one_is_the_measure() -> None:
    limits = GradientLimits(10.0)
    limits.factor(ONE, 1, 1.0)
    assert limits.factor(TWO, 1, 1e6) == pytest.approx(1e-5)
    assert limits.factor(ONE, 1, 1.0) == 1.0


def test_more_tokens_may_have_larger_gradients() -> None:
    limits = GradientLimits(10.0)
    limits.factor(ONE, 1, 1.0)
    assert limits.factor(TWO, 10_000, 900.0) == 1.0
    assert limits.factor(TWO, 1, 900.0) < 1.0


def test_norms_that_fall_together_are_followed() -> None:
    limits = GradientLimits(10.0)
    norm = 1e6
    for _ in range(300):
        norm *= 0.9
        assert {limits.factor(peer, 8, norm) for peer in (ONE, TWO, THREE)} == {1.0}


def test_trainers_that_are_gone_are_no_measure() -> None:
    limits = GradientLimits(10.0)
    limits.factor(ONE, 1, 1e-6)
    for _ in range(200):
        limits.factor(TWO, 1, 1.0)
    assert limits.factor(TWO, 1, 1.0) == 1.0
    for n in range(1000):
        limits.factor(PeerId(n.to_bytes(32, "big")), 1, 1.0)
    assert len(limits._logs) <= 256
