"""A peer that damages every message of averaging, as caller, leader, reducer and receiver, beside honest ones."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from typing import Any

import torch
from google.protobuf.message import DecodeError, Message

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.board import ROUNDS
from swarm.averaging.calls import COMMIT, JOIN, POLL, RELEASE, SEAL
from swarm.averaging.decisions import Terms
from swarm.averaging.declarations import DOMAIN, declare
from swarm.averaging.delivery import FATE, PUSH
from swarm.averaging.exchange import EXCHANGE
from swarm.averaging.gossip import PushSum
from swarm.averaging.probation import Probation, ProbationPolicy
from swarm.averaging.rounds import Round
from swarm.averaging.service import AveragingService
from swarm.averaging.view import priority
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import SwarmError
from swarm.net.base import HandlerFailed
from swarm.net.transport import ByteStream, CallContext
from swarm.pb import averaging_pb2 as pb
from swarm.runtime import TaskFailed
from tests.fuzzing import damaged
from tests.support import World, deterministic_identity

QUICK = {"matchmaking_s": 1.0, "chunk_timeout_s": 0.4, "round_timeout_s": 2.0, "share_reclaim_s": 1.0}
CONFIG = PeerConfig.preset("local", averaging=QUICK, transport={"max_calls_per_s": 1e9})
BEHIND = PeerConfig.preset("local", averaging={**QUICK, "sends_only": True}, transport={"max_calls_per_s": 1e9})
NUMEL = 3000
HUGE = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
ODD = (0.0, -1.0, 1e308, 5e-324, math.inf, math.nan)


class Victim:
    """An honest peer that averages in groups, and by push-sum where it can be called."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.averaging = AveragingService(endpoint)
        self.averaging.probation = Probation(ProbationPolicy(first_s=0.0, longest_s=0.0))  # the liar is met again
        self.values = [torch.full((NUMEL,), 2.0), torch.full((NUMEL,), 2.0)]
        self.trunk = Averager(self, self.values[:1], "trunk", AllReduce())
        self.push = Averager(self, self.values[1:], "push", PushSum())

    async def step(self) -> list[Round]:
        return [await self.trunk.step_async(), await self.push.step_async()]


class AveragingFuzz:
    """Honest peers, one of which nobody can call, and a liar with the lowest priority number."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._nonces: list[bytes] = [bytes(16)]
        self._declared: dict[Any, pb.SignedDeclaration] = {}
        self.tried = 0

    async def open(self) -> None:
        names = (deterministic_identity(f"liar {index}") for index in range(1000))
        liar = next(k for k in names if priority("trunk", k.peer_id) < b"\x04")
        self.liar = await self._world.endpoint(identity=liar, config=CONFIG)
        transport = self.liar.transport
        for method, good in (
            (JOIN, self._join_answer),
            (SEAL, lambda: pb.SealGroupResponse(accepted=True)),
            (COMMIT, pb.AveragingAck),
            (RELEASE, pb.AveragingAck),
            (POLL, self._poll_answer),
            (FATE, lambda: pb.ShareFateResponse(taken=True)),
        ):
            transport.serve(method, self._answering(method, good))
        transport.serve_stream(EXCHANGE, self._serve_stream)
        transport.serve_stream(PUSH, self._serve_stream)
        self.victims = [
            Victim(await self._world.endpoint(bootstrap=[self.liar.contact], config=config))
            for config in (CONFIG, CONFIG, BEHIND)
        ]
        for victim in self.victims:
            for averager in (victim.trunk, victim.push):
                await averager.open()
                self._world.at_close(averager.aclose)
        for key in ("trunk", "push"):
            await self.liar.dht.put(f"{ROUNDS}/{key}", {"addresses": list(self.liar.contact.addresses)}, ttl_s=3600)

    # What the liar answers -------------------------------------------------------------------------------------------

    def _answering(self, method: Any, good: Any) -> Any:
        async def answer(context: CallContext, request: Any) -> Message:
            if isinstance(request, pb.JoinGroupRequest):
                self._declared[context.peer_id] = request.declared
            if isinstance(request, pb.SealGroupRequest | pb.CommitGroupRequest):
                self._nonces = [*self._nonces, request.nonce][-8:]
            message: Message = good()
            for _ in range(20):
                with suppress(DecodeError):
                    self.tried += 1
                    return type(message).FromString(self._spoil(message))
            return message

        return answer

    def _spoil(self, message: Message) -> bytes:
        data = message.SerializeToString()
        return data if self._rng.random() < 0.4 else damaged(data, self._rng)

    def _join_answer(self) -> pb.JoinGroupResponse:
        rng = self._rng
        return pb.JoinGroupResponse(
            verdict=rng.choice((1, 1, 1, 3, 6, 8)),
            seal_within_s=rng.choice((2.0, *ODD)),
            leader=rng.choice((b"", rng.randbytes(32), self.victims[0].endpoint.peer_id.digest)),
            leader_addresses=["127.0.0.1:1"] * rng.choice((0, 1, 9)),
            turn=rng.choice(HUGE),
        )

    def _poll_answer(self) -> pb.PollGroupResponse:
        rng = self._rng
        kinds = [
            pb.GroupMessage(number=rng.choice(HUGE), seal=self._seal()),
            pb.GroupMessage(number=rng.choice(HUGE), commit=pb.CommitGroupRequest(nonce=rng.choice(self._nonces))),
            pb.GroupMessage(number=rng.choice(HUGE), release=pb.ReleaseGroupRequest(redirect=rng.randbytes(32))),
            pb.GroupMessage(number=rng.choice(HUGE)),
        ]
        return pb.PollGroupResponse(messages=rng.sample(kinds, rng.randrange(1, 4)))

    async def _serve_stream(self, context: CallContext, stream: ByteStream) -> None:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(1.0):
                for _ in range(self._rng.randrange(4)):
                    await stream.receive()
                    await stream.send(self._payload())

    def _payload(self) -> bytes:
        rng = self._rng
        values = torch.full((NUMEL // 2,), rng.choice((1.0, math.nan, 1e38))).numpy().tobytes()
        whole = torch.full((NUMEL,), 1.0).numpy().tobytes()
        answer = pb.ShareAnswer(taken=rng.random() < 0.5).SerializeToString()
        return rng.choice((values, whole, damaged(values[:64], rng), b"\0", b"\1", b"", answer))

    # What the liar asks ----------------------------------------------------------------------------------------------

    def _declaration(self) -> pb.SignedDeclaration:
        rng, schema_hash = self._rng, self.victims[0].trunk.schema_hash
        terms = Terms(rng.choice((schema_hash, bytes(32))), 1.0, NUMEL, sends_only=rng.random() < 0.2)
        signed = pb.SignedDeclaration.FromString(
            declare(self.liar.identity, "trunk", self.liar.contact.addresses, terms).signed
        )
        if rng.random() < 0.5:
            content = pb.MemberDeclaration.FromString(signed.declaration)
            content.weight, content.enters_in_s = rng.choice((1.0, *ODD)), rng.choice((0.0, *ODD))
            count = rng.choice((0, 3, 500))
            content.measured.extend([pb.MeasuredRate(peer_id=bytes(32), up=rng.choice(ODD), down=1.0)] * count)
            data = content.SerializeToString()
            signed.declaration = data if rng.random() < 0.7 else damaged(data, rng)
            signed.signature = self.liar.identity.sign(DOMAIN, signed.declaration)
        return signed

    def _seal(self) -> pb.SealGroupRequest:
        rng = self._rng
        others = list(self._declared.values())
        members = [self._declaration(), *rng.sample(others, rng.randint(0, len(others)))]
        if rng.random() < 0.1:
            members *= 100
        nonce = rng.choice((rng.randbytes(16), rng.choice(self._nonces), b""))
        self._nonces = [*self._nonces, nonce][-8:]
        return pb.SealGroupRequest(key="trunk", nonce=nonce, members=members, enter_within_s=rng.choice(ODD))

    async def ask(self) -> None:
        """One damaged call or stream to a victim."""
        rng, transport = self._rng, self.liar.transport
        victim = rng.choice(self.victims[:2])
        to, nonce = victim.endpoint.contact, rng.choice(self._nonces)
        join = pb.JoinGroupRequest(key="trunk", declared=self._declaration(), turn=rng.choice(HUGE))
        join.patience_s = rng.choice(ODD)
        calls: list[tuple[Any, Message]] = [
            (JOIN, join),
            (SEAL, self._seal()),
            (COMMIT, pb.CommitGroupRequest(key="trunk", nonce=nonce)),
            (RELEASE, pb.ReleaseGroupRequest(key="trunk", redirect=rng.choice((b"", b"x", rng.randbytes(32))))),
            (POLL, pb.PollGroupRequest(key="trunk", seen=rng.choice(HUGE), nonce=nonce, patience_s=rng.choice(ODD))),
            (FATE, pb.ShareFateRequest(key="push", incarnation=rng.randbytes(8), number=rng.choice(HUGE))),
        ]
        self.tried += 1
        with suppress(SwarmError, TimeoutError, DecodeError):
            if rng.random() < 0.6:
                method, good = rng.choice(calls)
                request = type(good).FromString(self._spoil(good))
                await transport.call(to, method, request, timeout_s=3.0)
            else:
                await self._stream(to, nonce)

    async def _stream(self, to: Any, nonce: bytes) -> None:
        rng = self._rng
        method: Any = rng.choice((EXCHANGE, PUSH))
        hello: Message = pb.ExchangeHello(
            nonce=nonce, chunks=rng.choice((0, 1, 2**32 - 1)), weight=rng.choice((1.0, *ODD)), check=rng.random() < 0.3
        )
        if method is PUSH:
            hello = pb.ShareHello(
                key="push", schema_hash=self.victims[0].push.schema_hash, incarnation=rng.randbytes(8),
                number=rng.choice(HUGE), settled_below=rng.choice(HUGE), weight=rng.choice((0.5, *ODD)),
                chunks=rng.choice((1, 1, 2**32 - 1)),
            )  # fmt: skip
        async with asyncio.timeout(2.0), self.liar.transport.stream(to, method, timeout_s=3.0) as stream:
            await stream.send(self._spoil(hello))
            for _ in range(rng.randrange(3)):
                await stream.send(self._payload())
            await stream.finish()
            await stream.receive()

    # Playing ---------------------------------------------------------------------------------------------------------

    async def rounds(self, count: int) -> None:
        """So many rounds of the victims, while the liar asks them something again and again."""
        for _ in range(count):
            steps = [asyncio.ensure_future(victim.step()) for victim in self.victims]
            while not all(step.done() for step in steps):
                for _ in range(self._rng.randrange(1, 5)):
                    await self.ask()
                await asyncio.sleep(self._rng.random() * 0.2)
            for step in steps:
                step.result()

    def check(self) -> None:
        """Nothing failed in a way that was not foreseen, nothing grew, no value is worse than what was sent."""
        for victim in self.victims:
            events = victim.endpoint.runtime.events
            assert not events.recent(HandlerFailed), events.recent(HandlerFailed)
            assert not events.recent(TaskFailed), events.recent(TaskFailed)
            assert all(bool(torch.isfinite(values).all()) for values in victim.values)
            seat: Any = victim.trunk._seat
            assert len(seat._entries._exchanges) <= 4
            assert len(seat._calls.mail._boxes) <= 256
            assert len(seat._declarations._checked) <= 1024

    async def well(self) -> bool:
        """Whether honest peers average once the liar is gone."""
        await self.liar.dht.delete(f"{ROUNDS}/trunk")
        await self.liar.transport.close(grace_s=0.0)
        for _ in range(3):
            ends = await asyncio.gather(*(victim.trunk.step_async() for victim in self.victims))
            if all(end.averaged and len(end.members) == 3 and not end.degraded for end in ends):
                return True
        return False
