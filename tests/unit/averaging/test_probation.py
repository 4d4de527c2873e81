"""Probation: terms grow with offences, end, and are forgotten."""

from __future__ import annotations

from swarm.averaging.probation import KEPT_PEERS, Offence, PeerOnProbation, Probation, ProbationPolicy
from swarm.identity import PeerId

PEER = PeerId(b"p" * 32)
POLICY = ProbationPolicy(first_s=10.0, longest_s=100.0, half_life_s=1000.0)


def test_terms_double_up_to_the_cap_and_end() -> None:
    probation, now = Probation(POLICY), 0.0
    terms = []
    for _ in range(6):
        event = probation.report(PEER, Offence.NON_FINITE, now, "in chunk 3")
        assert isinstance(event, PeerOnProbation)
        assert event.reason == "sent values that are not finite: in chunk 3"
        assert probation.reason(PEER, now) == event.reason
        terms.append(round(event.for_s))
        now += event.for_s
        assert probation.reason(PEER, now) == ""
        assert probation.remaining_s(PEER, now) == 0.0
    assert terms[0] == 10
    assert 1.8 < terms[1] / terms[0] <= 2.0
    assert terms == sorted(terms)
    assert terms[-1] == 100


def test_good_conduct_is_rewarded() -> None:
    probation = Probation(POLICY)
    for _ in range(4):
        probation.report(PEER, Offence.MALFORMED, 0.0)
    assert probation.remaining_s(PEER, 0.0) == 80.0
    event = probation.report(PEER, Offence.MALFORMED, 10_000.0)
    assert event is not None
    assert event.for_s < 11.0


def test_only_repeated_stalls_count() -> None:
    probation = Probation(POLICY)
    assert probation.report(PEER, Offence.STALLED, 0.0) is None
    assert probation.report(PEER, Offence.STALLED, 60.0) is None
    assert probation.reason(PEER, 60.0) == ""
    assert probation.report(PEER, Offence.STALLED, 120.0) is not None
    assert probation.current(121.0) == {PEER: "stalled in several rounds"}
    patient = Probation(POLICY)
    assert all(patient.report(PEER, Offence.STALLED, 5000.0 * i) is None for i in range(20))


def test_memory_is_bounded_and_huge_counts_do_not_overflow() -> None:
    probation = Probation(POLICY)
    for index in range(2 * KEPT_PEERS):
        probation.report(PeerId(index.to_bytes(32, "big")), Offence.DIVERGED, 0.0)
    assert len(probation.current(1.0)) == KEPT_PEERS
    for _ in range(5000):
        event = probation.report(PEER, Offence.LIED, 0.0)
        assert event is not None
        assert event.for_s <= POLICY.longest_s
