"""How a share of push-sum travels: a stream to its receiver, and questions about it if that ended without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError

from swarm.averaging.lag import LoopLag
from swarm.averaging.probation import Offence
from swarm.averaging.pushsum import Share
from swarm.averaging.shared import OnOffender
from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, SwarmError
from swarm.net.transport import Contact, StreamMethod, UnaryMethod
from swarm.pb import averaging_pb2 as pb
from swarm.roles import Role

_ROLES = frozenset({Role.TRAINER, Role.HOST})
PUSH = StreamMethod("/swarm.pb.Averaging/Push", _ROLES)
FATE = UnaryMethod("/swarm.pb.Averaging/ShareFate", pb.ShareFateRequest, pb.ShareFateResponse, _ROLES)

FIRST_QUESTION_S = 0.5
SLOWEST_QUESTIONS_S = 15.0
TOO_SLOW = "it did not read in time"


class Courier:
    """Brings shares to their receivers under one key.

    Args:
        on_bytes: Told how many bytes were sent.
        lag: Pauses of the loop on which it runs.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        key: str,
        schema_hash: bytes,
        on_offender: OnOffender,
        on_bytes: Callable[[int], None],
        lag: LoopLag,
    ) -> None:
        self._endpoint = endpoint
        self._config = endpoint.config.averaging
        self._key = key
        self._schema_hash = schema_hash
        self._offend = on_offender
        self._on_bytes = on_bytes
        self._lag = lag

    async def bring(self, share: Share[list[bytes]], contact: Contact, until: float) -> tuple[bool | None, str]:
        """Whether the share was taken, and if not, why. None: its receiver has been silent until `until`."""
        try:
            taken, reason = await self._deliver(share, contact)
        except (SwarmError, TimeoutError) as error:
            taken, reason = None, _reason(error)
        if taken is None:
            taken = await self._ask(share, contact, until)
        return taken, reason

    async def _deliver(self, share: Share[list[bytes]], contact: Contact) -> tuple[bool | None, str]:
        """Whether the share was taken, and why not; None: nobody knows. Raises only if all of it may have arrived."""
        patience_s = self._config.chunk_timeout_s
        hello = pb.ShareHello(
            key=self._key,
            schema_hash=self._schema_hash,
            incarnation=share.tag.incarnation,
            number=share.tag.number,
            settled_below=share.settled_below,
            weight=share.weight,
            chunks=len(share.content),
        )
        whole = False
        try:
            async with self._endpoint.transport.stream(contact, PUSH, timeout_s=self._config.round_timeout_s) as stream:
                answer = asyncio.ensure_future(stream.receive())
                try:
                    async with self._lag.timeout(patience_s):
                        await stream.send(hello.SerializeToString())
                    for index, payload in enumerate(share.content):
                        if answer.done():
                            break
                        whole = index + 1 == len(share.content)
                        async with self._lag.timeout(patience_s):
                            await stream.send(payload)
                        self._on_bytes(len(payload))
                    await stream.finish()
                    async with self._lag.timeout(patience_s):
                        data = await answer
                finally:
                    answer.cancel()
                    await asyncio.wait([answer])
                    if not answer.cancelled():
                        answer.exception()
        except (SwarmError, TimeoutError) as error:
            if whole:
                raise
            return False, _reason(error)
        reply = pb.ShareAnswer()
        try:
            reply.ParseFromString(data or b"")
        except DecodeError:
            data = None
        if data is None:
            return (None if whole else False), "its answer is malformed"
        if reply.taken and not whole:
            self._offend(share.to, Offence.MALFORMED, "took a share that it had not got")
        return reply.taken, reply.reason[:200]

    async def _ask(self, share: Share[list[bytes]], contact: Contact, until: float) -> bool | None:
        """Whether the share was taken, by its receiver's word; None if it had none until the end."""
        tag, pause_s, runtime = share.tag, FIRST_QUESTION_S, self._endpoint.runtime
        request = pb.ShareFateRequest(key=self._key, incarnation=tag.incarnation, number=tag.number)
        while (left_s := until - runtime.clock.time()) > 0:
            try:
                patience_s = min(self._config.chunk_timeout_s, left_s)
                reply = await self._endpoint.transport.call(contact, FATE, request, timeout_s=patience_s)
            except SwarmError:
                left_s = max(0.0, until - runtime.clock.time())
                await asyncio.sleep(min(pause_s * (0.75 + 0.5 * runtime.rng.random()), left_s))
                pause_s = min(2 * pause_s, SLOWEST_QUESTIONS_S)
            else:
                return reply.taken
        return None


def _reason(error: SwarmError | TimeoutError) -> str:
    return error.message if isinstance(error, SwarmError) else TOO_SLOW


def read_hello(data: bytes | None) -> pb.ShareHello:
    """Raises `MalformedFrameError` for bytes that are no hello of a share."""
    hello = pb.ShareHello()
    try:
        hello.ParseFromString(data or b"")
    except DecodeError as error:
        raise MalformedFrameError("The share does not begin with a hello.") from error
    return hello
