"""Beam search against brute force, and what the cache of prefixes keeps. No network."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.config import ClientConfig
from swarm.experts.beam import Found, PrefixCache, Told, Trie
from swarm.experts.prefixes import Prefix, PrefixRecord
from swarm.experts.spec import ExpertGrid
from tests.support import deterministic_identity

HUGE = ExpertGrid("ffn.[0:64].[0:64].[0:64]", "ffn")
HOST = deterministic_identity("host").peer_id
WIDTH = ClientConfig().beam_width
OTHER = deterministic_identity("other").peer_id


def some_experts(grid: ExpertGrid, count: int, seed: int) -> list[Prefix]:
    rng = random.Random(seed)
    flat = rng.sample(range(grid.size), count)
    return [tuple(int(c) for c in grid.uid_at(i).split(".")[1:]) for i in flat]


class World:
    """What hosts list, for a cache to read."""

    def __init__(self, grid: ExpertGrid, experts: list[Prefix]) -> None:
        self.below: dict[Prefix, set[int]] = {}
        for at in experts:
            for depth in range(len(at)):
                self.below.setdefault(at[:depth], set()).add(at[depth])
        self.cache = PrefixCache(grid, refresh_s=3.0, max_prefixes=1 << 16)
        self.reads: list[int] = []

    def read(self, prefixes: tuple[Prefix, ...]) -> None:
        self.reads.append(len(prefixes))
        for prefix in prefixes:
            listed = tuple(sorted(self.below.get(prefix, ())))
            told = [(HOST, "0", Told(PrefixRecord(listed, ("a:1",)), 1, 1e9))] if listed else []
            self.cache.answered(prefix, told, 0.0)

    def search(self, logits: list[Tensor], k: int, width: int) -> Found:
        """Read what is missing until nothing is."""
        while True:
            trie = self.cache.trie(0.0)
            found = trie.search(logits, k, width, trie.announced())
            if not found.missing:
                return found
            self.read(found.missing)


def brute_force(grid: ExpertGrid, experts: list[Prefix], logits: list[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Flat indices and scores of the best. Each [tokens, k]"""
    at = torch.tensor(experts)
    scores = sum(one[:, at[:, i]] for i, one in enumerate(logits))
    assert isinstance(scores, Tensor)
    best = scores.topk(min(k, len(experts)))
    strides = torch.tensor([grid.dims[1] * grid.dims[2], grid.dims[2], 1])
    return (at @ strides)[best.indices], best.values


def recall(found: Tensor, best: Tensor) -> float:
    return float((found.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean())


def random_logits(tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, size, generator=generator) for size in HUGE.dims]


def skewed_logits(tokens: int, seed: int) -> list[Tensor]:
    """As of a trained gate: a few coordinates are liked by many tokens, and tokens come in clusters."""
    generator = torch.Generator().manual_seed(seed)
    logits = []
    for size in HUGE.dims:
        liked = 2.0 * torch.randn(size, generator=generator)
        clusters = 2.0 * torch.randn(8, size, generator=generator)
        which = torch.randint(0, 8, (tokens,), generator=generator)
        logits.append(liked + clusters[which] + torch.randn(tokens, size, generator=generator))
    return logits


@settings(max_examples=25, deadline=None)
@given(
    dims=st.tuples(*[st.integers(1, 6)] * 3),
    density=st.floats(0.02, 1.0),
    k=st.integers(1, 5),
    seed=st.integers(0, 1 << 16),
)
def test_wide_beams_find_what_brute_force_finds(dims: tuple[int, int, int], density: float, k: int, seed: int) -> None:
    grid = ExpertGrid("g." + ".".join(f"[0:{d}]" for d in dims), "ffn")
    experts = some_experts(grid, max(1, int(density * grid.size)), seed)
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(7, size, generator=generator, dtype=torch.float64).float() for size in dims]
    found = World(grid, experts).search(logits, k, width=1 << 20)
    best, values = brute_force(grid, experts, logits, k)
    assert found.experts.shape == best.shape
    at = torch.unravel_index(found.experts, dims)
    scores = torch.stack([one.gather(1, c) for one, c in zip(logits, at, strict=True)]).sum(0)
    torch.testing.assert_close(scores, values, atol=1e-5, rtol=0)
    assert all(len(set(row)) == len(row) for row in found.experts.tolist())


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 3), k=st.integers(1, 6), seed=st.integers(0, 1 << 16))
def test_narrow_beams_still_find_k_live_experts(width: int, k: int, seed: int) -> None:
    grid = ExpertGrid("g.[0:5].[0:5].[0:5]", "ffn")
    experts = some_experts(grid, 12, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(3, 5, generator=generator) for _ in range(3)]
    found = World(grid, experts).search(logits, k, width)
    assert found.experts.shape == (3, min(k, 12))
    live = {a * 25 + b * 5 + c for a, b, c in experts}
    assert set(found.experts.flatten().tolist()) <= live


@pytest.mark.parametrize("make", [random_logits, skewed_logits])
def test_the_default_width_finds_99_percent_of_the_best_experts(make: Callable[[int, int], list[Tensor]]) -> None:
    """2,000 live experts of 262,144; each token alone with what it makes known, and a batch."""
    experts = some_experts(HUGE, 2000, 1)
    logits = make(24, 2)
    best, _ = brute_force(HUGE, experts, logits, 4)
    alone = [World(HUGE, experts).search([one[i : i + 1] for one in logits], 4, WIDTH).experts for i in range(24)]
    assert recall(torch.cat(alone), best) >= 0.99
    logits = make(256, 3)
    world = World(HUGE, experts)
    best, _ = brute_force(HUGE, experts, logits, 4)
    assert recall(world.search(logits, 4, WIDTH).experts, best) >= 0.99
    assert len(world.reads) == 3, "one read for each dimension"


def test_only_usable_experts_are_found_and_live_coordinates_are_those_known() -> None:
    grid = ExpertGrid("g.[0:3].[0:4]", "ffn")
    world = World(grid, [(0, 1), (2, 1), (2, 3)])
    logits = [torch.zeros(2, 3), torch.zeros(2, 4)]
    found = world.search(logits, 3, 8)
    assert [x.tolist() for x in found.live_coordinates] == [[True, False, True], [False, True, False, True]]
    trie = world.cache.trie(0.0)
    assert trie.experts == [(0, 1), (2, 1), (2, 3)]
    found = trie.search(logits, 3, 8, torch.tensor([True, False, True]))
    assert sorted(found.experts[0].tolist()) == [1, 11]
    assert trie.search(logits, 3, 8, trie.usable(lambda _: True)).experts.shape == (2, 0)
    assert Trie(grid, {}, {}).search(logits, 3, 8, torch.zeros(0, dtype=torch.bool)).missing == ((),)


def told(*listed: int, version: int = 1, expires_s: float = 30.0) -> Told:
    return Told(PrefixRecord(listed, ("a:1",)), version, expires_s)


def test_entries_of_hosts_merge_end_and_survive_one_read_that_missed_them() -> None:
    cache = PrefixCache(ExpertGrid("g.[0:8]", "ffn"), refresh_s=3.0, max_prefixes=100)
    cache.answered((), [(HOST, "0", told(1, 3)), (OTHER, "0", told(3, expires_s=20.0)), (OTHER, "1", told(9))], 0.0)
    trie = cache.trie(1.0)
    assert trie.experts == [(1,), (3,)], "9 is outside of the grid"
    assert {h.contact.peer_id for h in trie.holders[3,]} == {HOST, OTHER}
    assert cache.next_expiry_s == 20.0
    cache.answered((), [(HOST, "0", told(1, 3))], 3.0)
    assert len(cache.trie(3.0).holders[3,]) == 2
    cache.answered((), [(HOST, "0", told(1, 3))], 6.0)
    assert len(cache.trie(6.0).holders[3,]) == 1
    cache.answered((), [(HOST, "0", told(1, version=0))], 7.0)
    assert cache.trie(7.0).experts == [(1,), (3,)], "an older version changes nothing"
    assert cache.trie(31.0).experts == []


def test_what_a_host_says_it_does_not_hold_is_forgotten_until_it_announces_anew() -> None:
    cache = PrefixCache(ExpertGrid("g.[0:8]", "ffn"), refresh_s=3.0, max_prefixes=100)
    cache.answered((), [(HOST, "0", told(1, 3)), (OTHER, "0", told(3))], 0.0)
    cache.gone((3,), HOST)
    cache.gone((5, 5), HOST)
    assert [h.contact.peer_id for h in cache.trie(0.0).holders[3,]] == [OTHER]
    cache.answered((), [(HOST, "0", told(1, 3)), (OTHER, "0", told(3))], 3.0)
    assert len(cache.trie(3.0).holders[3,]) == 1
    cache.answered((), [(HOST, "0", told(1, 3, version=2)), (OTHER, "0", told(3))], 3.0)
    assert len(cache.trie(3.0).holders[3,]) == 2


def test_prefixes_are_read_again_in_time_and_forgotten_when_unused_or_too_many() -> None:
    cache = PrefixCache(ExpertGrid("g.[0:8].[0:8]", "ffn"), refresh_s=3.0, max_prefixes=3)
    cache.answered((), [(HOST, "0", told(1, 2))], 0.0)
    cache.answered((1,), [(HOST, "0", told(1))], 0.0)
    cache.answered((2,), [], 0.0)
    assert cache.due(2.9) == []
    assert cache.due(3.0) == [()]
    assert cache.due(9.0) == [(), (2,)]
    assert cache.due(15.0) == [(), (2,), (1,)], "when half of its life is over"
    cache.failed([(2,)], 15.0)
    assert cache.due(15.0) == [(), (1,)]
    cache.used([(1,)], 50.0)
    cache.due(61.0)
    assert ((1,) in cache, (2,) in cache, () in cache) == (True, False, True)
    for i in range(3, 6):
        cache.answered((i,), [], 60.0 + i)
    cache.trim()
    assert [(i,) in cache for i in range(1, 6)] == [False, False, False, True, True]
    assert len(cache) == 3
