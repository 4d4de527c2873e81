"""Thousands of exchanges in virtual time with members that fail at a random message. `SWARM_FAULT_SEEDS` sets how many.

pytest tests/long/test_averaging_faults.py
"""

from __future__ import annotations

import os

import pytest

from tests.exchanges import survive_faults

SEEDS = int(os.environ.get("SWARM_FAULT_SEEDS", "5000"))


@pytest.mark.timeout(1800)
def test_survivors_hold_their_mean_or_local_values_in_thousands_of_exchanges() -> None:
    survive_faults(range(1_000_000, 1_000_000 + SEEDS))
