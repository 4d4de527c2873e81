"""A member as a sender to one reducer: its values of the reducer's part go up, the averages come down.

The two directions are separate tasks. Coarse codecs encode on the codec pool, the next chunk while one is sent.
"""

from __future__ import annotations

import asyncio
import math

import torch

from swarm.averaging.agreement import checksum
from swarm.averaging.allreduce import NO_VALUES, NOT_COUNTED
from swarm.averaging.probation import Offence
from swarm.averaging.reducing import network_errors
from swarm.averaging.shared import EXCHANGE, Part, Shared
from swarm.averaging.vector import Chunk
from swarm.averaging.verification import Statement, digest
from swarm.errors import ConnectionLostError, MalformedFrameError, NoGroupError, PeerUnreachableError, SwarmError
from swarm.net.transport import ByteStream, Contact
from swarm.tensors.memory import peek
from swarm.tensors.schema import is_finite

DOWN = "/down"


class PartClient:
    """This member's stream to one reducer. `talk` once.

    Attributes:
        gone: Why the reducer cannot be reached any more; empty if it can.
    """

    def __init__(self, shared: Shared, part: Part) -> None:
        self._shared = shared
        self._part = part
        self._received = 0
        self._uncounted = 0
        self._sent: dict[int, bytes] = {}
        """Encodings whose fate error feedback waits for."""
        self.gone = ""

    async def talk(self) -> None:
        """Exchange until everything arrived or was given up. Network errors are notes in the report."""
        shared, part = self._shared, self._part
        reducer = part.member.peer_id
        contact = Contact(reducer, part.member.addresses)
        budget_s = shared.config.round_timeout_s + shared.seal.enter_within_s
        problem = ""
        try:
            async with shared.transport.stream(contact, EXCHANGE, timeout_s=budget_s) as stream:
                count = len(part.chunks) if shared.weight > 0 else 0
                hello = shared.hello(count)
                await stream.send(hello.SerializeToString())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_values(count, stream))
                    group.create_task(self._receive_averages(stream))
        except* SwarmError as errors:
            found = network_errors(errors)
            problem = found[0].message
            if any(isinstance(error, MalformedFrameError) and error.remote is None for error in found):
                shared.offend(reducer, Offence.MALFORMED, problem)
            if any(isinstance(error, (PeerUnreachableError, ConnectionLostError, NoGroupError)) for error in found):
                self.gone = "the connection to it broke"
        except* TimeoutError:
            problem = problem or "no averages came in time"
        finally:
            if part.verified is not None:
                part.verified.averages_over = True
                part.heard.fire()
            else:
                shared.settle(part)
        if part.verified is not None:
            if problem:
                shared.report.note(f"the averages of {reducer.short} ended early: {problem}")
        elif part.tally.lost:
            lost = f"{part.tally.lost} of {len(part.chunks)} chunks of {reducer.short}"
            shared.report.note(f"{lost} keep local values: {problem or 'their averages are not finite'}")
        if self._uncounted:
            shared.report.note(
                f"{self._uncounted} of {len(part.chunks)} chunks of {reducer.short} were averaged without our values"
            )

    async def _send_values(self, count: int, stream: ByteStream) -> None:
        shared = self._shared
        spent_s, nbytes = 0.0, 0
        ahead: asyncio.Task[bytes] | None = None
        try:
            for index in range(count):
                payload = await (ahead or self._encoded(index))
                ahead = None
                if index + 1 < count and self._is_coarse(self._part.chunks[index + 1]):
                    ahead = asyncio.ensure_future(self._encoded(index + 1))
                before = shared.now
                await stream.send(payload)
                if index:
                    spent_s, nbytes = spent_s + shared.now - before, nbytes + len(payload)
                shared.report.bytes_sent += len(payload)
        finally:
            if ahead is not None:
                ahead.cancel()
        if shared.bandwidth is not None:
            shared.bandwidth.observe(self._part.member.peer_id, nbytes, spent_s, "down")
        await shared.complete.wait()
        await stream.send(shared.result().to_bytes())
        await stream.finish()

    def _is_coarse(self, chunk: Chunk) -> bool:
        return self._shared.codec(chunk).unit_elements > 1

    async def _encoded(self, index: int) -> bytes:
        if index < self._received:
            return NO_VALUES  # the reducer went on without it: the next chunks may still be in time
        shared, chunk = self._shared, self._part.chunks[index]
        cost = 0.0 if shared.codec(chunk).is_copy else math.inf if self._is_coarse(chunk) else 6.0 * chunk.numel
        if self._part.verified is not None:
            cost = math.inf  # it is hashed
        payload = await shared.compute(cost, self._encode, index)
        if shared.feedback is not None and shared.feedback.covers(chunk.segment):
            self._sent[index] = payload
        return payload

    def _encode(self, index: int) -> bytes:
        payload = self._shared.encode(self._part, index)
        if self._part.verified is not None:
            self._part.verified.sent[index] = digest(payload)
        return payload

    async def _receive_averages(self, stream: ByteStream) -> None:
        shared, part, clock = self._shared, self._part, self._shared.runtime.clock
        reducer = part.member.peer_id
        for index, chunk in enumerate(part.chunks):
            needed = shared.encoded_nbytes(chunk)
            # A reducer may itself wait for a stalled sender before it goes on.
            others_s = shared.arrival_s if index == 0 else shared.config.chunk_timeout_s
            begun, counted = clock.time(), shared.weight > 0
            async with shared.lag.timeout(others_s + shared.patience_s(reducer, DOWN, needed)):
                payload = await stream.receive()
                stated = Statement()
                if part.verified is not None and payload is not None:
                    stated = Statement.from_bytes(payload, len(shared.parts))
                    counted = stated.of(shared.place) is not None
                    self._uncounted += bool(stated.inputs) and shared.weight > 0 and not counted
                    payload = await stream.receive()
                elif payload == NOT_COUNTED:
                    counted = False
                    self._uncounted += 1
                    payload = await stream.receive()
            if payload is None:
                raise ConnectionLostError("The reducer ended the stream early.")
            if len(payload) != needed and payload != NO_VALUES:
                raise MalformedFrameError(f"An average has {len(payload)} bytes where {needed} are needed.")
            if index:
                shared.waited(reducer, DOWN, needed, clock.time() - begun)
            shared.report.bytes_received += len(payload)
            self._received = index + 1
            if part.verified is not None:
                part.verified.averages[index] = (stated, payload)
                part.heard.fire()
                continue
            if payload == NO_VALUES:
                part.tally.stays_local(index)
                self._sent.pop(index, None)
                continue
            cost = math.inf if self._is_coarse(chunk) else 6.0 * chunk.numel
            if not await shared.compute(cost, self._apply, index, payload, counted):
                shared.offend(reducer, Offence.NON_FINITE, "in the averages of its part")
        if part.verified is None:
            shared.settle(part)
        await shared.complete.wait()
        async with shared.lag.timeout(shared.config.chunk_timeout_s):
            summary = await stream.receive()
            if summary is not None:
                shared.learn(reducer, summary)
                await stream.receive()  # its end: ours has arrived

    def _apply(self, index: int, payload: bytes, counted: bool) -> bool:
        """Write an average. False if it is not finite: local values stand."""
        shared, part = self._shared, self._part
        chunk = part.chunks[index]
        codec, dtype, encoded = shared.codec(chunk), shared.vector.segments[chunk.segment].dtype, peek(payload)
        values = None
        finite = codec.finite(encoded, chunk.numel, dtype)
        if finite is None:
            values = torch.empty(chunk.numel, dtype=dtype)
            codec.decode_into(encoded, values)
            finite = is_finite(values)
        if not finite:
            return False
        sent = self._sent.pop(index, None)
        if sent is not None and counted and shared.feedback is not None and sent != NO_VALUES:
            before = shared.vector.read(chunk)
            shared.feedback.counted(chunk.segment, chunk.start, before, shared.weight, codec, peek(sent))
        if values is None:
            shared.vector.decode(chunk, encoded)
        else:
            shared.vector.write(chunk, values)
        part.tally.averaged(index, checksum(payload))
        return True
