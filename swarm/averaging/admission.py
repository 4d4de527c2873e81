"""Who is admitted to the group that a peer is forming, and what the others are told. Without I/O."""

from __future__ import annotations

from swarm.averaging.decisions import AnswerJoin, JoinAsked, Timing, Verdict
from swarm.averaging.search import WRONG_WAY, Follower, Phase, Search
from swarm.averaging.view import View
from swarm.identity import PeerId


def admit(
    event: JoinAsked, me: PeerId, search: Search | None, phase: Phase, view: View, timing: Timing, now: float
) -> AnswerJoin:
    """Answer a request to join; whoever is admitted is among `search.followers` after it.

    Args:
        search: Of the peer that is asked, if it looks for a group.
        phase: In which it is.
    """
    peer = event.member.peer_id
    view.learn(peer, event.member.sends_only)
    if charge := view.barred(peer):
        return AnswerJoin(Verdict.PROBATION, reason=charge)
    if search is not None and event.cell != search.terms.cell:
        return AnswerJoin(Verdict.NOT_LOOKING)
    if search is not None and event.schema_hash != search.terms.schema_hash:
        search.other_schema(peer, event.schema_hash)
        return AnswerJoin(Verdict.MISMATCH, schema_hash=search.terms.schema_hash)
    view.heard(peer, search, now, event.member.enters_in_s, min(event.patience_s, timing.window_s))
    if search is None:
        return AnswerJoin(Verdict.NOT_LOOKING)
    if search.failed.get(peer) != WRONG_WAY:
        search.failed.pop(peer, None)  # whatever it was, the peer is there now
    if peer == me or search.terms.sends_only or view.may_lead_us(peer):
        search.next_poll_at = now  # it nudges us: it looks, so it may be asked at once
        return AnswerJoin(Verdict.WRONG_WAY)
    if phase is Phase.SEALING:
        if peer in search.followers and search.followers[peer].asked.member == event.member:
            return AnswerJoin(Verdict.ACCEPTED, seal_within_s=2 * timing.answer_s)
        return AnswerJoin(Verdict.BUSY)
    if phase is not Phase.LOOKING:
        return AnswerJoin(Verdict.REDIRECT, leader=search.leader)
    if peer not in search.followers and search.full:
        return AnswerJoin(Verdict.FULL)
    if now >= search.closes_at or not view.may_meet(search, peer, search.settled(now, timing)):
        return AnswerJoin(Verdict.BUSY)
    search.followers[peer] = Follower(event, now)
    return AnswerJoin(Verdict.ACCEPTED, seal_within_s=search.closes_at - now + timing.answer_s)
