"""Private randomness."""

from __future__ import annotations

import threading
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from swarm.experts.seeding import PrivateRandomness


def test_numbers_are_those_of_manual_seed_and_the_global_state_is_untouched() -> None:
    def draw() -> list[Tensor]:
        x = torch.empty(5).uniform_()
        return [x, torch.nn.init.normal_(torch.empty(3)), F.dropout(torch.ones(50), 0.5), torch.bernoulli(x)]

    torch.manual_seed(3)
    expected = draw()
    state = torch.get_rng_state()
    with PrivateRandomness(3) as mode:
        found = draw()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert mode.draws == 4


def test_factories_draw_from_the_private_generator_alone() -> None:
    def draw() -> list[Tensor]:
        x = torch.ones(3)
        return [
            torch.rand(4),
            torch.randn(3),
            torch.randperm(9),
            torch.randint(9, (3,)),
            torch.randint(2, 9, (3,)),
            torch.rand_like(x),
            torch.randn_like(x),
        ]

    torch.manual_seed(1)
    expected = draw()
    state = torch.get_rng_state()
    # nobody may seed the global generator, not even for a moment
    with PrivateRandomness(1) as mode, mock.patch.object(torch.random, "fork_rng", side_effect=AssertionError):
        found = draw()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert mode.draws == 7


def test_operations_that_take_no_generator_are_repeatable_too() -> None:
    def draw(seed: int) -> Tensor:
        with PrivateRandomness(seed):
            return torch.rrelu(-torch.ones(40), training=True)

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_native_dropout_keeps_the_expectation_and_its_gradient() -> None:
    x = torch.ones(20_000, requires_grad=True)
    with PrivateRandomness(5):
        y, mask = torch.native_dropout(x, 0.25, True)
        all_kept, _ = torch.native_dropout(x, 0.0, True)
        none_kept, _ = torch.native_dropout(x, 1.0, True)
        untouched, _ = torch.native_dropout(x, 0.5, False)
    assert abs(y.mean().item() - 1.0) < 0.02
    y.sum().backward()
    assert torch.equal(x.grad, mask / 0.75)  # type: ignore[arg-type]
    assert torch.equal(all_kept, x)
    assert not none_kept.any()
    assert torch.equal(untouched, x)


def test_another_thread_neither_disturbs_nor_is_disturbed() -> None:
    """A trainer draws from the global generator while a host replays dropout."""
    torch.manual_seed(9)
    expected_global = [torch.rand(8) for _ in range(200)]
    with PrivateRandomness(4):
        expected_private = [F.dropout(torch.ones(64), 0.5) for _ in range(200)]
    torch.manual_seed(9)
    private: list[Tensor] = []

    def replay() -> None:
        with PrivateRandomness(4):
            private.extend(F.dropout(torch.ones(64), 0.5) for _ in range(200))

    thread = threading.Thread(target=replay)
    thread.start()
    found_global = [torch.rand(8) for _ in range(200)]
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected_global, found_global, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected_private, private, strict=True))
