"""The server's half of expert calls: what the conformance tests of hosts do not reach."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm.endpoint import Endpoint
from swarm.errors import CallTimeoutError, HostBusyError, MalformedFrameError
from swarm.experts.backend import ComputeOptions, ExpertBackend
from swarm.experts.batching import Batcher
from swarm.experts.protocol import CALL, CALL_STREAM, CallRequest, CallResponse, PartRequest, RequestIds
from swarm.experts.serving import ExpertServer, GradientLimited, compute
from swarm.experts.spec import ExpertGrid
from swarm.experts.workers import InlineWorker
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import encode, from_frame, to_frame
from tests.support import MemoryWorld, World, eventually

GRID = ExpertGrid("a.[0:2]", "ffn", config={"hid": 4})


async def server(
    world: World, cache_bytes: int = 1 << 20, inflight: int = 1 << 30, **kwargs: Any
) -> tuple[ExpertServer, Endpoint]:
    endpoint = await world.endpoint()
    worker = InlineWorker(Batcher(100, 100), compute, endpoint.runtime)
    options = ComputeOptions(gradient_norm_ratio=10.0)
    experts = {"a.0": ExpertBackend(GRID, "a.0", bytes(32), options=options)}
    return ExpertServer(endpoint, experts, worker, cache_bytes, inflight, **kwargs), endpoint


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


def test_an_upload_that_stalls_or_drips_is_given_up_and_releases_what_it_held(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        served, endpoint = await server(memory_world, stall_s=2.0, upload_bytes_s=400.0)
        caller = await memory_world.endpoint()
        ids = RequestIds()

        def chunks(rows: int) -> list[bytes]:
            request = CallRequest("forward", (PartRequest("a.0", ids.next(), 1),))
            return list(encode(request.to_meta(), [torch.zeros(rows, 4)], chunk_bytes=512))

        async def send_slowly(pause_s: float) -> None:
            async with caller.transport.stream(endpoint.contact, CALL_STREAM, timeout_s=60.0) as stream:
                for chunk in chunks(100):
                    await stream.send(chunk)
                    await asyncio.sleep(pause_s)
                await receive_tensors(stream, caller.runtime)

        async def upload(pause_s: float) -> float:
            begun_s = caller.runtime.clock.time()
            with pytest.raises(CallTimeoutError):
                await send_slowly(pause_s)
            assert served.inflight.held_bytes == 0
            return caller.runtime.clock.time() - begun_s

        assert await upload(50.0) >= 2.0  # stalls after its first chunk
        # each chunk comes in time, but 1600 bytes have 2 + 4 seconds
        assert await upload(1.9) >= 6.0
        async with caller.transport.stream(endpoint.contact, CALL_STREAM, timeout_s=60.0) as stream:
            for _ in range(2):
                for chunk in chunks(100):
                    await stream.send(chunk)
                    await asyncio.sleep(0.5)
                await receive_tensors(stream, caller.runtime)
                await asyncio.sleep(10.0)  # between requests there is all the time in the world
            await stream.finish()

    memory_world.run(body)


def test_a_caller_that_does_not_take_its_answer_holds_nothing_for_ever(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        served, endpoint = await server(memory_world, stall_s=1.0)
        caller = await memory_world.endpoint()
        request = CallRequest("forward", (PartRequest("a.0", RequestIds().next(), 1),), timeout_s=5.0)
        async with caller.transport.stream(endpoint.contact, CALL_STREAM, timeout_s=600.0) as stream:
            # the answer is larger than what a stream buffers
            await send_tensors(stream, caller.runtime, request.to_meta(), [torch.zeros(3_000_000, 4)])
            await eventually(lambda: served.inflight.held_bytes > 0)
            await asyncio.sleep(20.0)
            assert served.inflight.held_bytes == 0

    memory_world.run(body)


def test_limited_gradients_are_counted_by_trainer_and_reported(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        served, endpoint = await server(memory_world)
        honest, liar = await memory_world.endpoint(), await memory_world.endpoint()
        ids, x = RequestIds(), torch.randn(3, 4)
        for caller, size in ((honest, 1.0), (liar, 1e6), (honest, 1.0)):
            part = PartRequest("a.0", ids.next(), 2, apply=True, with_inputs=True)
            request = CallRequest("backward", (part,))
            answer = await caller.transport.call(
                endpoint.contact, CALL, to_frame(request.to_meta(), [x, size * torch.ones(3, 4)])
            )
            [response] = CallResponse.from_meta(from_frame(answer)[0]).parts
            assert response.applied
        assert served.limited_by_peer == {liar.peer_id: 1}
        assert served.stats.limited_parts == 1
        [event] = [s.event for s in endpoint.runtime.events.recent(GradientLimited)]
        assert isinstance(event, GradientLimited)
        assert (event.uid, event.peer) == ("a.0", str(liar.peer_id))
        assert event.factor < 1e-3

    memory_world.run(body)
