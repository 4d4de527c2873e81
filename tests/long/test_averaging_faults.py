"""Thousands of exchanges in virtual time with members that fail at a random message. `SWARM_FAULT_SEEDS` sets how many.

pytest tests/long/test_averaging_faults.py
"""

from __future__ import annotations

import os

import pytest

from swarm.simulation.virtual import run_virtual
from tests.exchanges import CHUNK_TIMEOUT_S, ROUND_TIMEOUT_S, check, play_with_faults

SEEDS = int(os.environ.get("SWARM_FAULT_SEEDS", "5000"))


@pytest.mark.timeout(1800)
def test_survivors_hold_their_mean_or_local_values_in_thousands_of_exchanges() -> None:
    counts = {"local": 0, "all": 0, "some": 0}
    for seed in range(1_000_000, 1_000_000 + SEEDS):

        async def main(seed: int = seed) -> None:
            played, faults = await play_with_faults(seed)
            try:
                for kind, count in check(played, faults).items():
                    counts[kind] += count
                slowest = max(s for i, s in played.seconds.items() if i not in {f.member for f in faults})
                assert slowest <= ROUND_TIMEOUT_S + CHUNK_TIMEOUT_S
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {faults}: {error}") from error

        run_virtual(main, seed)
    assert min(counts.values()) > 0, f"the faults do not bite: {counts}"
