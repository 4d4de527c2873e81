"""What a seal says: how a leader composes one from those who asked, and what a member checks before it accepts one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.averaging.bandwidth import consensus, parts
from swarm.averaging.decisions import Terms
from swarm.averaging.rounds import Member, Seal
from swarm.averaging.search import Follower
from swarm.identity import PeerId

MAX_GROUP = 256
NONCE_BYTES = 16
MAX_ENTER_S = 600.0
"""A group sealed ahead of time waits no longer for its members, whatever its seal says."""


def compose(nonce: bytes, me: Member, terms: Terms, begun_at: float, followers: Sequence[Follower], now: float) -> Seal:
    """The seal of a group led by `me`, who reduces; parts go by the bandwidths that members measured of each other."""
    members = [Member(me.peer_id, me.addresses, terms.weight), *(f.asked.member for f in followers)]
    ids = [member.peer_id for member in members]
    reports = {me.peer_id: terms.measured, **{f.asked.member.peer_id: f.asked.measured for f in followers}}
    reduces = [not terms.sends_only, *(not f.asked.sends_only for f in followers)]
    sizes = parts(terms.numel, consensus(ids, reports), reduces)
    assert sizes is not None, "a group needs a reducer"
    due = [terms.enters_in_s - (now - begun_at), *(f.asked.enters_in_s - (now - f.at) for f in followers)]
    sealed = tuple(Member(m.peer_id, m.addresses, m.weight, size) for m, size in zip(members, sizes, strict=True))
    return Seal(nonce, terms.schema_hash, sealed, terms.cell, min(max(0.0, *due), MAX_ENTER_S))


def largest_part(seal: Seal, mine: Member, terms: Terms) -> int:
    """The most that one member may reduce, by what `mine` can know: 2 / n of the vector.

    Equal parts may be larger where at most half of the members reduce: then all of them have one, and so have we
    unless we only send. A leader that lies about others being such can still take more than its share.
    """
    count, reducers = len(seal.members), sum(member.part > 0 for member in seal.members)
    if not terms.sends_only and mine.part == 0:
        reducers = 2  # the leader and we
    equal = count <= 2 or 2 * reducers <= count
    return math.floor(terms.numel * (1 / max(1, reducers) if equal else 2 / count)) + 1


def problem(seal: Seal, leader: PeerId, me: PeerId, terms: Terms) -> str:
    """Why `me` must not accept this seal from `leader`; empty if it may.

    Members that `me` has on probation are no reason: leaving them out is for the leader, by what it saw itself. If each
    follower refused whom it distrusts, two that distrust different peers could never meet, and whoever can make others
    suspicious could break groups.
    """
    ids = [member.peer_id for member in seal.members]
    mine = [member for member in seal.members if member.peer_id == me]
    if len(ids) > MAX_GROUP or len(dict.fromkeys(ids)) != len(ids) or len(seal.nonce) != NONCE_BYTES:
        return "the seal is malformed"
    if len(mine) != 1 or leader not in ids:
        return "the seal names neither us nor its leader"
    if not terms.min_group <= len(ids) <= terms.max_group:
        return f"the group has {len(ids)} members where we want {terms.min_group} to {terms.max_group}"
    if seal.schema_hash != terms.schema_hash:
        return "the seal is for another schema"
    if seal.cell != terms.cell:
        return "the seal is for another cell"
    if sum(member.part for member in seal.members) != terms.numel:
        return "the parts do not cover the vector"
    if terms.sends_only and mine[0].part:
        return "the seal has us reduce, but we only send"
    if max(member.part for member in seal.members) > largest_part(seal, mine[0], terms):
        return "a member takes more than its share of the vector"
    if any(not math.isfinite(m.weight) or m.weight < 0 for m in seal.members) or mine[0].weight != terms.weight:
        return "the weights are wrong"
    if not 0 <= seal.enter_within_s <= MAX_ENTER_S:
        return "the seal waits too long"
    return ""
