"""Shards: an order of one's own, whole epochs, and going on where one stopped."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import pytest
from torch.utils.data import DataLoader

from swarm.errors import UsageError
from swarm.training import DataShard


@dataclass
class Somebody:
    name: str
    run_id: bytes = b"r" * 32


DATA = list(range(100))


def test_peers_read_the_same_items_in_different_orders_every_epoch() -> None:
    one, two = DataShard(DATA, Somebody("one")), DataShard(DATA, Somebody("two"))
    orders = [list(one), list(one), list(two), list(two)]
    assert all(sorted(order) == DATA for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert len(one) == 100
    assert list(DataShard(DATA, Somebody("one"))) == orders[0]


def test_a_seed_repeats_the_order_in_another_run() -> None:
    orders = {tuple(DataShard(DATA, Somebody("one", run), seed=3)) for run in (b"a" * 32, b"b" * 32)}
    assert len(orders) == 1
    assert tuple(DataShard(DATA, Somebody("one"), seed=4)) not in orders


@pytest.mark.parametrize("taken", [0, 1, 99, 100, 130])
def test_a_restarted_peer_goes_on_where_it_stopped(taken: int) -> None:
    def endless(shard: DataShard[int]) -> list[int]:
        items: list[int] = []
        while len(items) < 260:
            items.extend(shard)
        return items

    whole = endless(DataShard(DATA, Somebody("one")))
    shard = DataShard(DATA, Somebody("one"))
    stream = (item for _ in range(3) for item in shard)
    assert [next(stream) for _ in range(taken)] == whole[:taken]
    again = DataShard(DATA, Somebody("one"))
    again.load_state_dict(shard.state_dict())
    rest = list(again) or list(again)
    assert rest == whole[taken : taken + len(rest)]
    assert rest


def test_loaders_take_it_with_and_without_workers() -> None:
    shard = DataShard(DATA, Somebody("one"))
    assert sorted(int(x) for batch in DataLoader(shard, batch_size=8) for x in batch) == DATA
    spawn = multiprocessing.get_context("spawn")
    loader = DataLoader(shard, batch_size=8, num_workers=2, multiprocessing_context=spawn)
    assert sorted(int(x) for batch in loader for x in batch) == DATA


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError):
        DataShard([], Somebody("one"))
