"""Members that lie in whole exchanges: about their values, against robust reducers; verification under faults."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm.averaging.probation import Offence
from swarm.averaging.robust import CenteredClip, Median, RobustReducer, TrimmedMean
from swarm.simulation.poison import ATTACKS, Attack, poison
from swarm.simulation.virtual import run_virtual
from tests.exchanges import CHUNK_TIMEOUT_S, ROUND_TIMEOUT_S, Group, Played, check, play_with_faults, vectors_of


def values_of(members: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    truth = torch.randn(numel, generator=generator)
    return [truth + 0.1 * torch.randn(numel, generator=generator) for _ in range(members)]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("reducer", [CenteredClip(), Median(), TrimmedMean()], ids=lambda r: r.spec)
def test_two_liars_of_ten_do_not_move_a_robust_average(reducer: RobustReducer, attack: Attack) -> None:
    values = values_of(10, 3000)
    exact = torch.stack(values[2:]).mean(0)
    generator = torch.Generator().manual_seed(1)
    for liar in values[:2]:
        poison([liar], attack, generator)

    async def main() -> Played:
        group = Group([1e6, 1e6, *[1.0 + i % 2 for i in range(8)]], [300] * 10, reducer=reducer)
        await group.start()
        played = await group.exchange(vectors_of([[v.clone()] for v in values]))
        await group.close()
        return played

    played = run_virtual(main)
    assert all(torch.equal(after, played.after[0]) for after in played.after)
    assert all(report.problems == [] for report in played.reports.values())
    error = float((played.after[9] - exact).norm() / exact.norm())
    plain = float((torch.stack(values).mean(0) - exact).norm() / exact.norm())
    assert error < 0.15 < plain


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
@pytest.mark.parametrize("members", [2, 5])
def test_verified_parts_of_honest_members_are_confirmed(codec: str, members: int) -> None:
    values = values_of(members, 20_000)
    weights = [1.0, 2.0, 0.0, 1.5, 1.0][:members]
    parts = [10_000, 10_000] if members == 2 else [8000, 0, 6000, 6000, 0]

    async def main() -> Played:
        group = Group(weights, parts, chunk_bytes=4096, verify=True)
        await group.start()
        played = await group.exchange(vectors_of([[v.clone()] for v in values], codec), stochastic=True)
        await group.close()
        return played

    played = run_virtual(main)
    exact = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)  # type: ignore[operator]
    assert not played.offences
    assert all(report.problems == [] and report.others == () for report in played.reports.values())
    assert all(torch.equal(after, played.after[0]) for after in played.after)
    assert float((played.after[0] - exact).norm() / exact.norm()) < (0.3 if codec == "int4" else 0.02)


@pytest.mark.parametrize("block", range(2))
def test_verified_parts_survive_faults(block: int) -> None:
    counts = {"local": 0, "all": 0, "some": 0}
    for seed in range(20 * block, 20 * (block + 1)):

        async def main(seed: int = seed) -> None:
            played, faults = await play_with_faults(seed, verify=True)
            try:
                for kind, count in check(played, faults).items():
                    counts[kind] += count
                slowest = max(s for i, s in played.seconds.items() if i not in {f.member for f in faults})
                assert slowest <= ROUND_TIMEOUT_S + CHUNK_TIMEOUT_S
                failed = {played.ids[f.member] for f in faults}
                lied = [(me, peer) for me, peer, o in played.offences if o is Offence.LIED and peer not in failed]
                honest = [entry for entry in lied if played.ids[entry[0]] not in failed]
                assert honest == [], "an honest member is taken for a liar by one"
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {faults}: {error}") from error

        run_virtual(main, seed)
    assert counts["all"] > 0 < counts["local"]
