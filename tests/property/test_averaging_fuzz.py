"""Damaged messages of averaging through the real handlers, from fixed seeds; tests/long has minutes of them.

On the memory transport, where time is virtual: the liar's patience costs nothing.
"""

from __future__ import annotations

import random

import pytest

from tests.averaging_fuzz import AveragingFuzz
from tests.support import MemoryWorld


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_peer_sends_others_end_their_rounds_and_average_without_it(
    memory_world: MemoryWorld, seed: int
) -> None:
    async def main() -> None:
        fuzz = AveragingFuzz(memory_world, random.Random(seed))
        await fuzz.open()
        await fuzz.rounds(25)
        fuzz.check()
        assert fuzz.tried > 500
        assert await fuzz.well()

    memory_world.run(main)
