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
    """The seal of a group led by `me`, with parts by the bandwidths that members measured of each other.

    At least one of them must not be one that only sends.
    """
    members = [Member(me.peer_id, me.addresses, terms.weight), *(f.asked.member for f in followers)]
    ids = [member.peer_id for member in members]
    reports = {me.peer_id: terms.measured, **{f.asked.member.peer_id: f.asked.measured for f in followers}}
    reduces = [not terms.sends_only, *(not f.asked.sends_only for f in followers)]
    sizes = parts(terms.numel, consensus(ids, reports), reduces)
    assert sizes is not None, "a group needs a reducer"
    due = [terms.enters_in_s - (now - begun_at), *(f.asked.enters_in_s - (now - f.at) for f in followers)]
    sealed = tuple(Member(m.peer_id, m.addresses, m.weight, size) for m, size in zip(members, sizes, strict=True))
    return Seal(nonce, terms.schema_hash, sealed, terms.cell, min(max(0.0, *due), MAX_ENTER_S))


def problem(seal: Seal, leader: PeerId, me: PeerId, terms: Terms) -> str:
    """Why `me` must not accept this seal from `leader`; empty if it may."""
    ids = [member.peer_id for member in seal.members]
    mine = [member for member in seal.members if member.peer_id == me]
    if len(ids) > MAX_GROUP or len(dict.fromkeys(ids)) != len(ids) or len(seal.nonce) != NONCE_BYTES:
        return "the seal is malformed"
    if len(mine) != 1 or leader not in ids:
        return "the seal names neither us nor its leader"
    if seal.schema_hash != terms.schema_hash:
        return "the seal is for another schema"
    if seal.cell != terms.cell:
        return "the seal is for another cell"
    if sum(member.part for member in seal.members) != terms.numel:
        return "the parts do not cover the vector"
    if terms.sends_only and mine[0].part:
        return "the seal has us reduce, but we only send"
    if any(not math.isfinite(m.weight) or m.weight < 0 for m in seal.members) or mine[0].weight != terms.weight:
        return "the weights are wrong"
    if not 0 <= seal.enter_within_s <= MAX_ENTER_S:
        return "the seal waits too long"
    return ""
