"""What a link does to bytes, without any: times of departure, and damage from a seed."""

import random

import pytest

from swarm.errors import UsageError
from swarm.simulation.shaping import Corruptor, Lane, Shape, piece_bytes


def test_a_lane_lets_bytes_out_at_its_rate_whosever_they_are() -> None:
    lane = Lane(8.0)  # 10^6 bytes a second
    assert [lane.reserve(10.0, 1_000_000), lane.reserve(10.0, 500_000)] == [11.0, 11.5]
    assert lane.reserve(20.0, 1_000_000) == 21.0  # nothing is saved up while it is idle
    lane.set(16.0)
    assert lane.reserve(20.0, 1_000_000) == 21.5
    lane.set(None)
    assert lane.reserve(20.0, 1_000_000) == 20.0
    assert lane.nbytes == 4_500_000


def test_pieces_are_short_on_slow_lanes_and_bounded_on_fast_ones() -> None:
    assert piece_bytes([Lane()]) == 64 * 1024
    assert piece_bytes([Lane(1000.0), Lane(8.0)]) == 20_000
    assert piece_bytes([Lane(0.01)]) == 1460


def test_damage_depends_on_the_seed_and_not_on_the_pieces() -> None:
    data = bytes(200_000)

    def damaged(seed: int, step: int) -> bytes:
        corruptor = Corruptor(random.Random(seed))
        return b"".join(corruptor.apply(data[i : i + step], 100.0) for i in range(0, len(data), step))

    once = damaged(1, 1000)
    assert once == damaged(1, 1000)
    assert [i for i, b in enumerate(once) if b] == pytest.approx([i for i, b in enumerate(damaged(1, 777)) if b], abs=1)
    assert once != damaged(2, 1000)
    flips = [byte for byte in once if byte]
    assert 5 <= len(flips) <= 50  # 20 are expected
    assert all(byte.bit_count() == 1 for byte in flips)


def test_a_link_without_damage_passes_the_same_object() -> None:
    data = b"abc"
    assert Corruptor(random.Random(0)).apply(data, 0.0) is data


@pytest.mark.parametrize(
    "wrong", [{"latency_ms": -1.0}, {"jitter_ms": float("inf")}, {"up_mbit": 0.0}, {"down_mbit": float("nan")}]
)
def test_impossible_shapes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Shape(**wrong)  # type: ignore[arg-type]
