"""What a seal says: how a leader composes one from those who asked, and what a member checks before it accepts one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.averaging.bandwidth import consensus, parts
from swarm.averaging.decisions import Terms
from swarm.averaging.probation import Offence
from swarm.averaging.rounds import Member, Seal
from swarm.averaging.search import Follower
from swarm.identity import PeerId

MAX_GROUP = 256
NONCE_BYTES = 16
MAX_ENTER_S = 600.0
"""A group sealed ahead of time waits no longer for its members, whatever its seal says."""


def compose(nonce: bytes, me: Member, terms: Terms, begun_at: float, followers: Sequence[Follower], now: float) -> Seal:
    """The seal of a group led by `me`, who reduces; parts go by the bandwidths that members measured of each other."""
    members = (declared(me, terms), *(f.asked.member for f in followers))
    due = [terms.enters_in_s - (now - begun_at), *(f.asked.member.enters_in_s - (now - f.at) for f in followers)]
    seal = Seal(nonce, terms.schema_hash, members, terms.cell, min(max(0.0, *due), MAX_ENTER_S))
    return portioned(seal, terms.numel)


def declared(me: Member, terms: Terms) -> Member:
    """A member that brings these terms to a round."""
    return replace(
        me,
        weight=terms.weight,
        part=0,
        sends_only=terms.sends_only,
        enters_in_s=terms.enters_in_s,
        measured=terms.measured,
    )


def portioned(seal: Seal, numel: int) -> Seal:
    """The seal with the parts of a vector of `numel` elements that follow from what its members declared.

    Every member computes them, so that none can be told another one's: bandwidths that others measured, nothing for
    those that only send.
    """
    ids = [member.peer_id for member in seal.members]
    bandwidths = consensus(ids, {member.peer_id: member.measured for member in seal.members})
    sizes = parts(numel, bandwidths, [not member.sends_only for member in seal.members])
    assert sizes is not None, "a group needs a reducer"
    return replace(seal, members=tuple(replace(m, part=n) for m, n in zip(seal.members, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a seal must not be accepted.

    Attributes:
        offence: What the leader did, if an honest one would not have.
    """

    reason: str
    offence: Offence | None = None


def objection(
    seal: Seal, leader: PeerId, me: Member, terms: Terms, order: Callable[[PeerId], bytes]
) -> Objection | None:
    """Why `me` must not accept this seal from `leader`; none if it may. All members said what is in it: see `declare`.

    Members that `me` has on probation are no reason: leaving them out is for the leader, by what it saw itself. If each
    follower refused whom it distrusts, two that distrust different peers could never meet, and whoever can make others
    suspicious could break groups.

    Args:
        order: By this the members after the leader are sorted; whose part lies where is not for the leader to choose.
    """
    ids = [member.peer_id for member in seal.members]
    mine = [member for member in seal.members if member.peer_id == me.peer_id]
    if len(ids) > MAX_GROUP or len(dict.fromkeys(ids)) != len(ids) or len(seal.nonce) != NONCE_BYTES:
        return Objection("the seal is malformed", Offence.MALFORMED)
    if len(mine) != 1 or leader not in ids:
        return Objection("the seal names neither us nor its leader", Offence.MALFORMED)
    if ids[0] != leader or ids[1:] != sorted(ids[1:], key=order):
        return Objection("the members are not in their order", Offence.MALFORMED)
    if seal.members[0].sends_only:
        return Objection("its leader only sends", Offence.MALFORMED)
    if not 0 <= seal.enter_within_s <= max(member.enters_in_s for member in seal.members):
        return Objection("the seal waits for longer than any member asked for", Offence.MALFORMED)
    if not terms.min_group <= len(ids) <= terms.max_group:
        return Objection(f"the group has {len(ids)} members where we want {terms.min_group} to {terms.max_group}")
    if seal.schema_hash != terms.schema_hash:
        return Objection("the seal is for another schema", Offence.OUTDATED)
    if seal.cell != terms.cell:
        return Objection("the seal is for another cell", Offence.OUTDATED)
    if replace(mine[0], part=0) != declared(me, terms):
        return Objection("the seal has us say what we said for another round", Offence.OUTDATED)
    return None
