"""One RPC to a host of experts: a small one as a message each way, a larger one as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.config import KIB, MIB
from swarm.endpoint import Endpoint
from swarm.experts.protocol import CALL, CALL_STREAM, MAX_CALL_PAYLOAD_BYTES, MAX_PARTS, CallRequest, CallResponse
from swarm.net.transport import Contact
from swarm.tensors.codecs import codec as find_codec
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import Limits, from_frame, to_frame

SMALL_CALL_BYTES = 256 * KIB
"""Requests and responses up to this size travel as single messages."""
_PART_BYTES = 256
_FRAME_BYTES = 512


@dataclass(slots=True)
class Progress:
    """How far a call has come. Until `sent`, its tensors are still read, and the host cannot have begun the work."""

    sent: bool = False


async def call_host(
    endpoint: Endpoint,
    contact: Contact,
    request: CallRequest,
    tensors: Sequence[Tensor],
    *,
    codec: str = "none",
    reply_bytes: int = 0,
    timeout_s: float,
    progress: Progress | None = None,
) -> tuple[CallResponse, list[list[Tensor]]]:
    """Send a request and its tensors.

    Args:
        endpoint: Whose transport and settings are used.
        contact: The host.
        request: What it shall do.
        tensors: The tensors of all parts, in order.
        codec: How floating-point tensors travel there; the request names the codec back.
        reply_bytes: Expected size of the answer, if known: bounds what is accepted, and decides with the request's
            size between a message and a stream.
        timeout_s: Deadline of the whole exchange.
        progress: Told how far the call has come.

    Returns:
        The response's header and its tensors by part.

    Raises:
        NetworkError: The host could not be reached or did not answer.
        WireError: The answer is malformed.
        SwarmError: What the host refused the whole call with.
    """
    transport = endpoint.transport
    codecs: str | list[str] = codec
    if codec != "none":
        found = find_codec(codec)
        codecs = [codec if found.carries(t.dtype) else "none" for t in tensors]
    limits = Limits(
        max_tensors=MAX_PARTS * 4,
        max_payload_bytes=min(MAX_CALL_PAYLOAD_BYTES, 4 * reply_bytes + MIB) if reply_bytes else MAX_CALL_PAYLOAD_BYTES,
    )
    overhead = _FRAME_BYTES + _PART_BYTES * len(request.parts)
    if max(sum(t.nbytes for t in tensors), reply_bytes) + overhead <= SMALL_CALL_BYTES:
        frame = to_frame(request.to_meta(), tensors, codecs)
        if progress is not None:
            progress.sent = True  # a copy of everything is under way
        reply = await transport.call(contact, CALL, frame, timeout_s=timeout_s)
        meta, answers = from_frame(reply, limits)
    else:
        async with transport.stream(contact, CALL_STREAM, timeout_s=timeout_s) as stream:

            async def send() -> None:
                chunk_bytes = endpoint.config.transport.chunk_bytes
                await send_tensors(stream, endpoint.runtime, request.to_meta(), tensors, codecs, chunk_bytes)
                if progress is not None:
                    progress.sent = True  # before the end is told: from then on the host may begin
                await stream.finish()

            # A host that refuses early answers while we are still sending: its reason is what counts, so sending
            # is a task of its own whose failure shows in receiving.
            sending = asyncio.get_running_loop().create_task(send(), name="expert-call-send")
            try:
                meta, answers = await receive_tensors(stream, endpoint.runtime, limits)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    response = CallResponse.from_meta(meta)
    response.check_answers(request)
    return response, response.split(answers)
