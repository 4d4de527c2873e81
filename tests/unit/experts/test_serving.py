"""The server's half of expert calls: what the conformance tests of hosts do not reach."""

from __future__ import annotations

import pytest
import torch

from swarm.endpoint import Endpoint
from swarm.errors import HostBusyError, MalformedFrameError
from swarm.experts.backend import ExpertBackend
from swarm.experts.batching import Batcher, InlineWorker
from swarm.experts.protocol import CALL, CALL_STREAM, CallRequest, CallResponse, PartRequest, RequestIds
from swarm.experts.serving import ExpertServer, compute
from swarm.experts.spec import ExpertGrid
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import encode, from_frame, to_frame
from tests.support import MemoryWorld, World, eventually

GRID = ExpertGrid("a.[0:2]", "ffn", config={"hid": 4})


async def server(world: World, cache_bytes: int = 1 << 20, inflight: int = 1 << 30) -> tuple[ExpertServer, Endpoint]:
    endpoint = await world.endpoint()
    worker = InlineWorker(Batcher(100, 100), compute, endpoint.runtime)
    experts = {"a.0": ExpertBackend(GRID, "a.0", bytes(32))}
    return ExpertServer(endpoint, experts, worker, cache_bytes, inflight), endpoint


def test_several_calls_may_follow_each_other_on_one_stream(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        served, endpoint = await server(memory_world)
        caller = await memory_world.endpoint()
        ids, x = RequestIds(), torch.randn(3, 4)
        async with caller.transport.stream(endpoint.contact, CALL_STREAM, timeout_s=10.0) as stream:
            for n in range(3):
                request = CallRequest("forward", (PartRequest("a.0", ids.next(), 1),))
                await send_tensors(stream, caller.runtime, request.to_meta(), [x[: n + 1]], chunk_bytes=16)
                meta, [y] = await receive_tensors(stream, caller.runtime)
                CallResponse.from_meta(meta).check_answers(request)
                assert y.shape == (n + 1, 4)
            await stream.finish()
            assert await stream.receive() is None
        assert served.stats.calls == 3

    memory_world.run(body)


def test_answers_use_the_codec_that_was_asked_for_and_tell_waiting_from_computing(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        _, endpoint = await server(memory_world)
        caller = await memory_world.endpoint()
        x, ids = torch.randn(3, 4), RequestIds()
        sizes = {}
        for codec in ("none", "bf16"):
            request = CallRequest("forward", (PartRequest("a.0", ids.next(), 1),), reply_codec=codec)
            answer = await caller.transport.call(endpoint.contact, CALL, to_frame(request.to_meta(), [x]))
            meta, [y] = from_frame(answer)
            assert y.dtype == torch.float32
            sizes[codec] = len(answer)
            response = CallResponse.from_meta(meta)
            assert response.queue_s == 0.0
            assert response.compute_s > 0.0
        assert sizes["none"] - sizes["bf16"] >= 20

    memory_world.run(body)


def test_graphs_count_towards_the_cache_and_evaluation_does_not(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        served, endpoint = await server(memory_world)
        caller = await memory_world.endpoint()
        x, ids = torch.randn(3, 4), RequestIds()

        async def forward(train: bool) -> None:
            request = CallRequest("forward", (PartRequest("a.0", ids.next(), 1),), train=train)
            await caller.transport.call(endpoint.contact, CALL, to_frame(request.to_meta(), [x]))

        await forward(train=False)
        assert served.cache.nbytes == 0
        await forward(train=True)
        assert served.cache.nbytes > x.nbytes

    memory_world.run(body)


def test_requests_that_are_on_their_way_are_bounded_together_and_released_however_they_end(
    memory_world: MemoryWorld,
) -> None:
    async def body() -> None:
        served, endpoint = await server(memory_world, inflight=1000)
        caller = await memory_world.endpoint()
        ids = RequestIds()

        def chunks(rows: int) -> list[bytes]:
            request = CallRequest("forward", (PartRequest("a.0", ids.next(), 1),))
            return list(encode(request.to_meta(), [torch.zeros(rows, 4)], chunk_bytes=512))

        async def whole(rows: int) -> None:
            async with caller.transport.stream(endpoint.contact, CALL_STREAM, timeout_s=10.0) as stream:
                for chunk in chunks(rows):
                    await stream.send(chunk)
                await receive_tensors(stream, caller.runtime)
                await stream.finish()

        await whole(1000)  # alone, larger than the budget
        assert served.inflight.held_bytes == 0
        async with caller.transport.stream(endpoint.contact, CALL_STREAM, timeout_s=10.0) as stream:
            for chunk in chunks(50)[:2]:
                await stream.send(chunk)
            await eventually(lambda: served.inflight.held_bytes == 800)
            with pytest.raises(HostBusyError):
                await whole(20)
            unary = CallRequest("forward", (PartRequest("a.0", ids.next(), 1),))
            frame = to_frame(unary.to_meta(), [torch.zeros(20, 4)])
            with pytest.raises(HostBusyError):
                await caller.transport.call(endpoint.contact, CALL, frame)
            assert served.inflight.held_bytes == 800
            await whole(12)  # fits beside it
            # the caller gives up in the middle
        await eventually(lambda: served.inflight.held_bytes == 0)
        with pytest.raises(MalformedFrameError):
            await caller.transport.call(endpoint.contact, CALL, to_frame({"no": "request"}, [torch.zeros(9, 4)]))
        assert served.inflight.held_bytes == 0

    memory_world.run(body)
