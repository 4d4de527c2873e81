"""Members that stall, die or lie in the middle of an exchange: survivors finish in time, with nothing mixed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.allreduce import AllReduce, choose_codecs, make_feedback
from swarm.averaging.probation import Offence
from swarm.averaging.vector import FlatVector
from swarm.simulation.virtual import run_virtual
from swarm.tensors.partition import split
from swarm.tensors.schema import TensorMeta
from tests.exchanges import (
    Fault,
    Group,
    check,
    survive_faults,
    vectors_of,
)


@pytest.mark.parametrize("block", range(4))
def test_survivors_hold_their_mean_or_local_values_whatever_fails(block: int) -> None:
    survive_faults(range(30 * block, 30 * (block + 1)))


@settings(max_examples=25)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 7.25]), min_size=1, max_size=16),
    shares=st.lists(st.sampled_from([0.0, 1.0, 1.0, 3.0]), min_size=16, max_size=16),
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]), min_size=4),
    seed=st.integers(0, 2**31),
)
def test_everybody_gets_the_weighted_mean_in_the_same_bits(
    weights: list[float],
    shares: list[float],
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    seed: int,
) -> None:
    shares = shares[: len(weights)]
    shares[seed % len(weights)] = 1.0  # somebody must reduce
    numel = sum(math.prod(shape) for shape in shapes)
    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=False)] for _ in weights]
    before = [[tensor.clone() for tensor in row] for row in rows]

    async def main() -> None:
        group = Group(weights, [len(part) for part in split(numel, shares)], seed=seed)
        await group.start()
        played = await group.exchange(vectors_of(rows))
        await group.close()
        for index, report in played.reports.items():
            assert report.problems == []
            assert report.others == ()
            assert played.seconds[index] < 5

    run_virtual(main, seed)
    for column, inputs in zip(zip(*rows, strict=True), zip(*before, strict=True), strict=True):
        for mine, own in zip(column, inputs, strict=True):
            if not any(weights):
                assert torch.equal(mine, own)
                continue
            assert torch.equal(mine, column[0])
            exact = sum(w * x.double() for w, x in zip(weights, inputs, strict=True)) / sum(weights)
            tolerance = 2e-2 if mine.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("codec", "rounds", "bound"),
    [
        ("none", 1, 1e-6),
        ("fp16", 1, 2e-3),
        ("bf16", 1, 1e-2),
        ("auto", 1, 1e-2),
        ("int8", 8, 2e-3),
        ("int4", 12, 0.02),
        ("topk:1024", 12, 0.2),
    ],
)
def test_results_are_bit_identical_with_every_codec_and_feedback_makes_up_for_what_is_lost(
    codec: str, rounds: int, bound: float
) -> None:
    strategy = AllReduce(codec=codec, role="gradients")
    weights, parts = [1.0, 2.0, 0.0, 1.0], [15_000, 14_000, 0, 13_000]
    generator = torch.Generator().manual_seed(5)
    metas = [TensorMeta((41_000,), torch.float32), TensorMeta((1000,), torch.float32)]
    codecs = choose_codecs(codec, strategy.role, metas)
    deltas = [[torch.randn(m.shape, generator=generator) for m in metas] for _ in weights]
    exact = [sum(w * d for w, d in zip(weights, c, strict=True)) / sum(weights) for c in zip(*deltas, strict=True)]
    sums = [torch.zeros(m.shape) for m in metas]

    async def main() -> None:
        group = Group(weights, parts, chunk_bytes=16 * 1024)
        await group.start()
        layout = FlatVector(metas, codecs)
        group.feedbacks = [make_feedback(strategy.error_feedback, layout, b"") for _ in weights]
        for _ in range(rounds):
            rows = [[delta.clone() for delta in row] for row in deltas]
            vectors = [FlatVector(metas, codecs, over=row) for row in rows]
            played = await group.exchange(vectors, stochastic=True)
            assert all(report.problems == [] and report.others == () for report in played.reports.values())
            for row in rows[1:]:
                assert all(torch.equal(a, b) for a, b in zip(row, rows[0], strict=True))
            for total, mine in zip(sums, rows[0], strict=True):
                total.add_(mine)
        await group.close()

    run_virtual(main)
    for total, mean in zip(sums, exact, strict=True):
        error = float((total / rounds - mean).norm() / mean.norm())
        assert error < bound


def test_a_sender_that_pauses_counts_again_once_it_has_caught_up() -> None:
    weights, parts = [1.0, 1.0, 1.0], [40_000, 0, 0]
    faults = (Fault(1, "pauses", 100, pause_s=1.6),)

    async def main() -> None:
        group = Group(weights, parts, upload_bytes_s=64 * 1024)
        await group.start()
        vectors = vectors_of([[torch.randn(sum(parts))] for _ in weights])
        played = await group.exchange(vectors, faults)
        await group.close()
        counts = check(played, faults)
        assert counts["all"] > 0 < counts["some"], counts
        assert counts["local"] == 0
        kinds = [
            "all" if torch.allclose(played.after[0][a:b], torch.stack(played.values)[:, a:b].mean(0)) else "some"
            for a, b in played.chunks
        ]
        assert kinds[0] == kinds[-1] == "all", "it counts before the pause and after it"
        slow = played.ids[1].short
        assert any(slow in p and "sent nothing" in p for p in played.reports[0].problems)
        assert any("averaged without our values" in p for p in played.reports[1].problems)
        assert [(me, peer, o) for me, peer, o in played.offences] == [(0, played.ids[1], Offence.STALLED)]

    run_virtual(main)


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_feedback_keeps_what_was_not_counted(codec: str) -> None:
    """Sum over rounds of W * average + what all hold back = sum of what counted, element by element."""
    weights, parts = [1.0, 2.0, 4.0], [200_000, 200_000, 0]
    generator = torch.Generator().manual_seed(3)
    applied, counted = torch.zeros(sum(parts), dtype=torch.float64), torch.zeros(sum(parts), dtype=torch.float64)
    uncounted = 0

    async def main() -> None:
        nonlocal uncounted
        group = Group(weights, parts, chunk_bytes=4096)
        await group.start()
        for number in range(4):
            vectors = vectors_of([[torch.randn(sum(parts), generator=generator)] for _ in weights], codec)
            if number == 0:
                group.feedbacks = [make_feedback(None, vectors[0], b"") for _ in weights]
            faults = (Fault(2, "pauses", 3, pause_s=2.5),) if number in (1, 2) else ()
            played = await group.exchange(vectors, faults)
            assert torch.equal(played.after[0], played.after[1])
            contributors = [c for e in played.exchanges for c in e._server._contributors]
            owner = [0 if start < parts[0] else 1 for start, _ in played.chunks]
            for (start, stop), who, reducer in zip(played.chunks, contributors, owner, strict=True):
                members = [reducer if peer is None else played.ids.index(peer) for peer in who]
                uncounted += 2 not in members
                piece = slice(start, stop)
                applied[piece] += sum(weights[m] for m in members) * played.after[0][piece].double()
                counted[piece] += sum(weights[m] * played.values[m][piece].double() for m in members)
        await group.close()
        held = torch.stack([f.residual(0, 0, sum(parts)) for f in group.feedbacks if f is not None]).double().sum(0)
        torch.testing.assert_close(applied + held, counted, rtol=1e-4, atol=1e-3)

    run_virtual(main)
    assert uncounted > 0, "the pauses do not bite"


def test_who_sends_what_is_not_finite_is_named_and_told_on() -> None:
    async def main() -> None:
        group = Group([1.0, 1.0, 1.0], [600, 600, 600])
        await group.start()
        vectors = vectors_of([[torch.randn(1800)] for _ in range(3)])
        faults = (Fault(2, "sends NaN", 0),)
        played = await group.exchange(vectors, faults)
        await group.close()
        counts = check(played, faults)
        assert counts["some"] > 0 < counts["local"], "its values are left out, its averages refused"
        told = {(me, peer) for me, peer, offence in played.offences if offence is Offence.NON_FINITE}
        assert told == {(0, played.ids[2]), (1, played.ids[2])}
        for index in (0, 1):
            problems = played.reports[index].problems
            assert any(played.ids[2].short in p and "not finite: left out" in p for p in problems)
            assert any(played.ids[2].short in p and "keep local values" in p for p in problems)

    run_virtual(main)


def test_members_with_other_values_know_whose_count() -> None:
    """One member loses an average on the way: it is told apart from those who agree."""

    async def main() -> None:
        group = Group([1.0, 1.0, 1.0, 1.0], [600, 600, 600, 600])
        await group.start()
        vectors = vectors_of([[torch.randn(2400)] for _ in range(4)])
        victim, liar = group.transports[3].peer_id, group.transports[0].peer_id
        before = group._injector

        def injector(played, faults):  # type: ignore[no-untyped-def]
            inner, done = before(played, faults), []

            def corrupt(source, target, path, data):  # type: ignore[no-untyped-def]
                data = inner(source, target, path, data)
                if (source, target) == (liar, victim) and len(data) == 256 and played.messages[0] > 33 and not done:
                    done.append(True)
                    return torch.zeros(64).numpy().tobytes()
                return data

            return corrupt

        group._injector = injector  # type: ignore[method-assign]
        played = await group.exchange(vectors)
        await group.close()
        values = played.after
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])
        assert not torch.equal(values[0], values[3])
        for report in played.reports.values():
            assert sorted(report.agreed) == sorted(played.ids[:3])
            assert report.others == (victim,)

    run_virtual(main)


def test_bandwidth_is_measured_of_others() -> None:
    async def main() -> None:
        group = Group([1.0, 1.0, 0.0], [100_000, 100_000, 0])
        group.network.bandwidth_bytes_s = 1e6
        await group.start()
        await group.exchange(vectors_of([[torch.randn(200_000)] for _ in range(3)]))
        await group.close()
        seen = [{rate.peer: rate for rate in b.measured()} for b in group.bandwidths]
        ids = [t.peer_id for t in group.transports]
        assert seen[0][ids[1]].up > 0 < seen[1][ids[0]].up
        assert ids[2] not in seen[0], "it sent nothing"

    run_virtual(main)
