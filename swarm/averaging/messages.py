"""Matchmaking's messages: from values to protobuf and back, with every field of a stranger's message checked."""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarm.averaging.bandwidth import REPORTED_PEERS, Rate
from swarm.averaging.decisions import AnswerJoin, JoinAnswered, JoinAsked, Terms, Verdict
from swarm.averaging.rounds import Member, Seal
from swarm.averaging.seals import MAX_ENTER_S, MAX_GROUP
from swarm.errors import MalformedFrameError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.pb import averaging_pb2 as pb

MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 260
MAX_CELL_CHARS = 40
MAX_REASON_CHARS = 200


def checked_addresses(raw: Iterable[object]) -> tuple[str, ...]:
    """Addresses from a record or message. Raises `MalformedFrameError` if there are too many or too long ones."""
    addresses = tuple(str(a) for a in raw)
    if len(addresses) > MAX_ADDRESSES or any(len(a) > MAX_ADDRESS_CHARS for a in addresses):
        raise MalformedFrameError("Too many or too long addresses.")
    return addresses


def join_request(key: str, me: Contact, terms: Terms, patience_s: float) -> pb.JoinGroupRequest:
    return pb.JoinGroupRequest(
        key=key,
        schema_hash=terms.schema_hash,
        weight=terms.weight,
        addresses=me.addresses[:MAX_ADDRESSES],
        patience_s=patience_s,
        cell=terms.cell,
        sends_only=terms.sends_only,
        enters_in_s=terms.enters_in_s,
        turn=terms.turn,
        measured=[pb.MeasuredRate(peer_id=r.peer.digest, up=r.up, down=r.down) for r in terms.measured],
    )


def read_join(caller: PeerId, request: pb.JoinGroupRequest) -> JoinAsked:
    """Raises `MalformedFrameError` for a request that no peer of ours sends."""
    if not 0 <= request.weight < math.inf or len(request.schema_hash) != 32:
        raise MalformedFrameError("The weight or the schema hash of the request cannot be.")
    if not 0 <= request.enters_in_s <= MAX_ENTER_S or len(request.cell) > MAX_CELL_CHARS:
        raise MalformedFrameError("The time or the cell of the request cannot be.")
    if len(request.measured) > REPORTED_PEERS or any(
        not (0 <= r.up < math.inf and 0 <= r.down < math.inf) for r in request.measured
    ):
        raise MalformedFrameError("The measured rates of the request cannot be.")
    return JoinAsked(
        Member(caller, checked_addresses(request.addresses), request.weight),
        bytes(request.schema_hash),
        patience_s=max(0.0, request.patience_s) if math.isfinite(request.patience_s) else 0.0,
        cell=request.cell,
        sends_only=request.sends_only,
        enters_in_s=request.enters_in_s,
        measured=tuple(Rate(PeerId(bytes(r.peer_id)), r.up, r.down) for r in request.measured),
    )


def join_response(answer: AnswerJoin, leader: Contact | None, turn: int) -> pb.JoinGroupResponse:
    response = pb.JoinGroupResponse(
        verdict=int(answer.verdict),  # type: ignore[arg-type]
        seal_within_s=answer.seal_within_s,
        schema_hash=answer.schema_hash,
        reason=answer.reason[:MAX_REASON_CHARS],
        turn=turn,
    )
    if answer.leader is not None:
        response.leader = answer.leader.digest
        if leader is not None:
            response.leader_addresses.extend(leader.addresses[:MAX_ADDRESSES])
    return response


def read_join_response(peer: PeerId, reply: pb.JoinGroupResponse) -> JoinAnswered:
    """Raises `MalformedFrameError` for an answer that no peer of ours gives."""
    try:
        verdict = Verdict(reply.verdict)
    except ValueError as error:
        raise MalformedFrameError("The verdict is unknown.") from error
    leader = PeerId(bytes(reply.leader)) if reply.leader else None
    seal_within_s = reply.seal_within_s if math.isfinite(reply.seal_within_s) else 0.0
    return JoinAnswered(
        peer, verdict, seal_within_s, leader, bytes(reply.schema_hash)[:32], reply.reason[:MAX_REASON_CHARS]
    )


def seal_request(key: str, seal: Seal) -> pb.SealGroupRequest:
    return pb.SealGroupRequest(
        key=key,
        nonce=seal.nonce,
        schema_hash=seal.schema_hash,
        cell=seal.cell,
        enter_within_s=seal.enter_within_s,
        members=[
            pb.GroupMember(peer_id=m.peer_id.digest, addresses=m.addresses, weight=m.weight, part=m.part)
            for m in seal.members
        ],
    )


def read_seal(request: pb.SealGroupRequest) -> Seal:
    """Raises `MalformedFrameError` for a seal that cannot be. Whether it may be accepted is the matchmaker's matter."""
    if len(request.members) > MAX_GROUP:
        raise MalformedFrameError("The group is too large.")
    members = tuple(
        Member(PeerId(bytes(m.peer_id)), checked_addresses(m.addresses), m.weight, m.part) for m in request.members
    )
    return Seal(bytes(request.nonce), bytes(request.schema_hash), members, request.cell, request.enter_within_s)
