"""Averaging's methods on the network: registers them once per peer and dispatches calls by averaging key."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.bandwidth import Bandwidths
from swarm.averaging.calls import COMMIT, JOIN, POLL, RELEASE, SEAL
from swarm.averaging.decisions import Committed
from swarm.averaging.delivery import FATE, PUSH, read_hello
from swarm.averaging.exchange import EXCHANGE
from swarm.averaging.gossip import Gossip, PushSum
from swarm.averaging.probation import Offence, Probation
from swarm.averaging.pushing import PushSeat
from swarm.averaging.pushsum import INCARNATION_BYTES, Receipts, Tag
from swarm.averaging.seat import Seat
from swarm.averaging.vector import FlatVector
from swarm.endpoint import Endpoint
from swarm.errors import ClosedError, MalformedFrameError, NoGroupError, RateLimitedError, UsageError
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, CallContext
from swarm.pb import averaging_pb2 as pb

__all__ = ["COMMIT", "JOIN", "POLL", "RELEASE", "SEAL", "AveragingService", "Seat"]


class AveragingService:
    """One per peer: registers the averaging methods and dispatches them by averaging key."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.bandwidth = Bandwidths()
        """What this peer measured of others while it exchanged values with them."""
        self.probation = Probation()
        """Whom this peer leaves out for a while."""
        self._seats: dict[str, Seat] = {}
        self._push_seats: dict[str, PushSeat] = {}
        self._receipts: dict[str, Receipts] = {}
        """Outlive seats: senders may still ask what became of their shares."""
        self._closed = False
        transport = endpoint.transport
        transport.serve(JOIN, self._join)
        transport.serve(SEAL, self._seal)
        transport.serve(COMMIT, self._commit)
        transport.serve(RELEASE, self._release)
        transport.serve(POLL, self._poll)
        transport.serve_stream(EXCHANGE, self._exchange)
        transport.serve_stream(PUSH, self._push)
        transport.serve(FATE, self._fate)

    @property
    def closed(self) -> bool:
        return self._closed

    async def open(self, key: str, strategy: AllReduce | Gossip) -> Seat:
        """Take part under a key, and announce it.

        Raises:
            UsageError: This peer averages under this key already.
        """
        self._check_free(key)
        seat = self._seats[key] = Seat(self.endpoint, key, strategy, self.bandwidth, self.probation, self.report)
        await seat.board.announce()
        return seat

    async def open_push(self, key: str, strategy: PushSum, layout: FlatVector, schema_hash: bytes) -> PushSeat:
        """Like `open`, for push-sum on vectors of this layout."""
        self._check_free(key)
        config = self.endpoint.config.averaging
        now, seats = self.endpoint.runtime.clock.time(), self._push_seats
        self._receipts = {k: kept for k, kept in self._receipts.items() if k in seats or not kept.idle(now)}
        receipts = self._receipts.setdefault(key, Receipts(2 * (config.share_reclaim_s + config.round_timeout_s)))
        seat = self._push_seats[key] = PushSeat(
            self.endpoint, key, strategy, layout, schema_hash, receipts, self.probation, self.report
        )
        await seat.board.announce()
        return seat

    def _check_free(self, key: str) -> None:
        if self._closed:
            raise ClosedError("The peer is closed.")
        if key in self._seats or key in self._push_seats:
            raise UsageError(
                f"This peer averages under {key!r} already.", fix="Close that averager, or use another key."
            )

    async def shut(self, key: str) -> None:
        """Stop taking part under a key and withdraw the announcement. Idempotent."""
        seat = self._seats.pop(key, None) or self._push_seats.pop(key, None)
        if seat is not None:
            seat.abandon()
            await seat.board.withdraw()

    def report(self, peer: PeerId, offence: Offence, detail: str = "") -> None:
        """A peer spoiled a round of ours. After enough of that it is left out of new groups for a while."""
        event = self.probation.report(peer, offence, self.endpoint.runtime.clock.time(), detail)
        if event is not None:
            self.endpoint.runtime.emit(event)

    async def close(self) -> None:
        """Leave every key. Idempotent."""
        self._closed = True
        for key in [*self._seats, *self._push_seats]:
            await self.shut(key)

    def _seat(self, key: str) -> Seat:
        seat = self._seats.get(key)
        if seat is None:
            raise NoGroupError(f"This peer does not average under {key[:60]!r}.")
        return seat

    async def _join(self, context: CallContext, request: pb.JoinGroupRequest) -> pb.JoinGroupResponse:
        return await self._seat(request.key).joined(context.peer_id, request)

    async def _seal(self, context: CallContext, request: pb.SealGroupRequest) -> pb.SealGroupResponse:
        return await self._seat(request.key).sealed(context.peer_id, request)

    async def _commit(self, context: CallContext, request: pb.CommitGroupRequest) -> pb.AveragingAck:
        self._seat(request.key).feed(Committed(bytes(request.nonce)))
        return pb.AveragingAck()

    async def _release(self, context: CallContext, request: pb.ReleaseGroupRequest) -> pb.AveragingAck:
        self._seat(request.key).released(context.peer_id, request)
        return pb.AveragingAck()

    async def _poll(self, context: CallContext, request: pb.PollGroupRequest) -> pb.PollGroupResponse:
        return await self._seat(request.key).poll(context.peer_id, request)

    async def _exchange(self, context: CallContext, stream: ByteStream) -> None:
        first = await stream.receive()
        hello = pb.ExchangeHello()
        try:
            hello.ParseFromString(first or b"")
        except DecodeError as error:
            raise MalformedFrameError("The exchange does not begin with a hello.") from error
        for seat in list(self._seats.values()):
            if seat.takes_part(bytes(hello.nonce)):
                exchange = await seat.exchange(bytes(hello.nonce))
                await exchange.serve(context.peer_id, hello, stream)
                return
        raise NoGroupError("This peer is in no such group.")

    async def _push(self, context: CallContext, stream: ByteStream) -> None:
        hello = read_hello(await stream.receive())
        seat = self._push_seats.get(hello.key)
        if seat is None:
            raise NoGroupError(f"This peer does not average by push-sum under {hello.key[:60]!r}.")
        await seat.serve(context.peer_id, hello, stream)

    async def _fate(self, context: CallContext, request: pb.ShareFateRequest) -> pb.ShareFateResponse:
        receipts = self._receipts.get(request.key)
        if receipts is None:
            raise NoGroupError(f"This peer does not average by push-sum under {request.key[:60]!r}.")
        tag = Tag(bytes(request.incarnation), request.number)
        if len(tag.incarnation) != INCARNATION_BYTES:
            raise MalformedFrameError("The id of the share cannot be.")
        taken = receipts.fate(context.peer_id, tag, self.endpoint.runtime.clock.time())
        if taken is None:
            raise RateLimitedError("Too many shares are remembered to answer for one more.", fix="Ask again later.")
        return pb.ShareFateResponse(taken=taken)
