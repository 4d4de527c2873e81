"""Matchmaking's messages: from values to protobuf and back, with every field of a stranger's message checked."""

from __future__ import annotations

import math

from swarm.averaging.decisions import AnswerJoin, JoinAnswered, JoinAsked, Verdict
from swarm.averaging.declarations import MAX_ADDRESSES, Declaration
from swarm.averaging.rounds import Member, Seal
from swarm.errors import MalformedFrameError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.pb import averaging_pb2 as pb

MAX_REASON_CHARS = 200


def join_request(key: str, me: Member, patience_s: float, turn: int) -> pb.JoinGroupRequest:
    return pb.JoinGroupRequest(
        key=key, declared=pb.SignedDeclaration.FromString(me.signed), patience_s=patience_s, turn=turn
    )


def join_asked(declared: Declaration, patience_s: float) -> JoinAsked:
    """A request to join, of a peer that declared this."""
    patience_s = max(0.0, patience_s) if math.isfinite(patience_s) else 0.0
    return JoinAsked(declared.member, declared.schema_hash, patience_s, declared.cell)


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
        enter_within_s=seal.enter_within_s,
        members=[pb.SignedDeclaration.FromString(member.signed) for member in seal.members],
    )


def seal_of(request: pb.SealGroupRequest, declared: list[Declaration]) -> Seal:
    """The seal of members that declared this, without parts. Whether it may be accepted is the matchmaker's matter."""
    first = declared[0]
    members = tuple(declaration.member for declaration in declared)
    return Seal(request.nonce, first.schema_hash, members, first.cell, request.enter_within_s)
