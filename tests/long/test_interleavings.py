"""Matchmaking through tens of thousands of generated interleavings; new ones with `SWARM_SEED=...`. A minute or two."""

from __future__ import annotations

import os

import pytest

from tests.interleavings import Net, Plan

BASE = int(os.environ.get("SWARM_SEED", "100000"))


@pytest.mark.parametrize("chunk", range(20))
@pytest.mark.parametrize("faults", [False, True])
def test_interleavings(faults: bool, chunk: int) -> None:
    for seed in range(BASE + 1000 * chunk, BASE + 1000 * (chunk + 1)):
        try:
            Net(Plan.draw(seed, faults)).play()
        except AssertionError as error:
            raise AssertionError(f"{Plan.draw(seed, faults)}: {error}") from error
