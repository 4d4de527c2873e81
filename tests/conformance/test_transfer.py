"""State transfer between two peers, on both transports: verified, resumable, bounded, and safe against liars."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import (
    ConnectionLostError,
    CorruptStateError,
    FrameTooLargeError,
    MalformedFrameError,
    NoDonorError,
    NotAuthorizedError,
    RateLimitedError,
    SnapshotGoneError,
    SwarmError,
    TransferInterruptedError,
)
from swarm.net.transport import ByteStream, CallContext, Contact
from swarm.pb import state_pb2 as pb
from swarm.roles import Role
from swarm.state import transfer
from swarm.state.transfer import (
    CHUNKS,
    DESCRIBE,
    LEASE_S,
    MAX_QUEUED_PER_PEER,
    ChunkRefetched,
    PartialSnapshot,
    Snapshot,
    SnapshotStore,
    StateFetched,
    StateServed,
    fetch_snapshot,
)
from swarm.tensors.wire import Limits
from tests.support import MemoryWorld, World, eventually

CHUNK = 16 * 1024
CHUNKS_IN_STATE = 25
TENSORS = {
    "weight": torch.randn(64, 1568, generator=torch.Generator().manual_seed(0)),
    "moment": torch.arange(333, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "step": torch.tensor(7),
}
IMPATIENT = PeerConfig.preset("local", deadline={"initial_s": 0.4, "floor_s": 0.1, "cap_s": 0.4})
Alter = Callable[[int, bytes], bytes | None]


def state(number: int = 7, /, **changed: torch.Tensor) -> Snapshot:
    return Snapshot.build({**TENSORS, **changed}, {"step": number}, chunk_bytes=CHUNK)


def assert_same(snapshot: Snapshot, expected: Snapshot) -> None:
    assert snapshot.id == expected.id
    assert snapshot.metadata == expected.metadata
    assert list(snapshot.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert torch.equal(snapshot.tensors[name], tensor)


async def pair(world: World, config: PeerConfig | None = None) -> tuple[Endpoint, SnapshotStore, Endpoint]:
    """A donor that publishes `state()` under `trunk`, and a joiner."""
    donor = await world.endpoint(config=config)
    store = SnapshotStore(donor)
    store.publish("trunk", state())
    return donor, store, await world.endpoint(config=config)


class AlteringStream(ByteStream):
    """A donor's side of a stream on which chunks are altered, or end the stream where `alter` gives none."""

    def __init__(self, stream: ByteStream, alter: Alter) -> None:
        self._stream = stream
        self._alter = alter
        self._count = 0

    async def send(self, chunk: bytes) -> None:
        altered = self._alter(self._count, chunk)
        self._count += 1
        if altered is None:
            raise ConnectionLostError("The test broke the stream.")
        await self._stream.send(altered)

    async def finish(self) -> None:
        await self._stream.finish()

    async def receive(self) -> bytes | None:
        return await self._stream.receive()


def altering(donor: Endpoint, store: SnapshotStore, alter: Alter) -> None:
    """Have the donor send something else than it should."""

    async def handler(context: CallContext, stream: ByteStream) -> None:
        await store._chunks(context, AlteringStream(stream, alter))

    donor.transport.serve_stream(CHUNKS, handler)


def flip(chunk: bytes) -> bytes:
    return bytes([chunk[0] ^ 1]) + chunk[1:]


def test_a_snapshot_arrives_whole(world: World) -> None:
    async def main() -> None:
        donor, _store, joiner = await pair(world)
        seen: list[tuple[int, int]] = []
        snapshot = await fetch_snapshot(
            joiner, donor.contact, "trunk", timeout_s=20, progress=lambda *done: seen.append(done)
        )
        expected = state()
        assert_same(snapshot, expected)
        assert expected.manifest.chunk_count == CHUNKS_IN_STATE
        assert seen == sorted(seen)
        assert seen[0] == (0, expected.nbytes)
        assert seen[-1] == (expected.nbytes, expected.nbytes)
        [fetched] = joiner.runtime.events.recent(StateFetched)
        assert (fetched.event.nbytes, fetched.event.reused_bytes) == (expected.nbytes, 0)
        await eventually(lambda: donor.runtime.events.count(StateServed) == 1)
        [served] = donor.runtime.events.recent(StateServed)
        assert (served.event.key, served.event.nbytes) == ("trunk", expected.nbytes)
        assert served.event.to_peer == str(joiner.peer_id)

    world.run(main)


def test_the_receiver_can_give_it_on(world: World) -> None:
    async def main() -> None:
        donor, _, joiner = await pair(world)
        third = await world.endpoint()
        received = await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20)
        SnapshotStore(joiner).publish("trunk", received)
        assert_same(await fetch_snapshot(third, joiner.contact, "trunk", timeout_s=20), state())

    world.run(main)


def test_a_snapshot_without_content(world: World) -> None:
    async def main() -> None:
        donor, store, joiner = await pair(world)
        store.publish("empty", Snapshot.build({"none": torch.empty(0, 4)}, {"step": 1}))
        snapshot = await fetch_snapshot(joiner, donor.contact, "empty", timeout_s=20)
        assert snapshot.tensors["none"].shape == (0, 4)
        assert snapshot.metadata == {"step": 1}

    world.run(main)


def test_keys(memory_world: MemoryWorld) -> None:
    """Memory only: nothing here depends on the transport."""

    async def main() -> None:
        store = SnapshotStore(await memory_world.endpoint())
        assert store.keys() == []
        first = state()
        store.publish("b", first)
        store.publish("a", state(8))
        store.publish("b", state(9))
        assert store.keys() == ["b", "a"]
        replaced = store.get("b")
        assert replaced is not None
        assert replaced.metadata == {"step": 9}
        store.withdraw("b")
        store.withdraw("never published")
        assert store.keys() == ["a"]
        assert store.get("b") is None
        for key in ("", "k" * 257):
            with pytest.raises(ValueError, match="1 to 256"):
                store.publish(key, first)

    memory_world.run(main)


class TestNoDonor:
    def test_nothing_under_the_key(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            with pytest.raises(NoDonorError, match="no snapshot under 'other'") as caught:
                await fetch_snapshot(joiner, donor.contact, "other", timeout_s=20)
            assert caught.value.remote == str(donor.peer_id)
            store.withdraw("trunk")
            with pytest.raises(NoDonorError):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20)

        world.run(main)

    def test_a_peer_that_serves_no_state(self, world: World) -> None:
        async def main() -> None:
            other, joiner = await world.endpoint(), await world.endpoint()
            with pytest.raises(NoDonorError):
                await fetch_snapshot(joiner, other.contact, "trunk", timeout_s=20)

        world.run(main)

    def test_nobody_at_the_address(self, world: World) -> None:
        async def main() -> None:
            donor, _, joiner = await pair(world)
            gone = Contact(donor.peer_id, ("127.0.0.1:1",))
            with pytest.raises(NoDonorError, match="Ask another peer"):
                await fetch_snapshot(joiner, gone, "trunk", timeout_s=20)

        world.run(main)

    def test_a_role_that_may_not_download(self, world: World) -> None:
        async def main() -> None:
            donor, _, _ = await pair(world)
            monitor = await world.endpoint(roles={Role.MONITOR})
            with pytest.raises(NotAuthorizedError):
                await fetch_snapshot(monitor, donor.contact, "trunk", timeout_s=20)
            with pytest.raises(NotAuthorizedError):
                await monitor.transport.call(donor.contact, DESCRIBE, pb.SnapshotRequest(key="trunk"))
            with pytest.raises(NotAuthorizedError):
                await ask(monitor, donor, bytes(32), (0, 1))

        world.run(main)


class TestCorruption:
    def test_a_corrupt_chunk_is_fetched_again(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            altering(donor, store, lambda i, chunk: flip(chunk) if i in (0, 13, 24) else chunk)
            assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20), state())
            refetched = [s.event.index for s in joiner.runtime.events.recent(ChunkRefetched)]
            assert refetched == [0, 13, 24]

        world.run(main)

    @pytest.mark.parametrize("spoil", [flip, lambda c: c[:-1], lambda c: c + b"x", lambda _: b"?"])
    def test_twice_corrupt_is_an_error_and_the_rest_is_kept(self, world: World, spoil: Any) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            altering(donor, store, lambda i, chunk: spoil(chunk) if i in (3, CHUNKS_IN_STATE) else chunk)
            partial = PartialSnapshot()
            with pytest.raises(CorruptStateError, match=r"1 chunks of 'trunk'.*another donor"):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial)
            assert partial.missing == [3]
            donor.transport.serve_stream(CHUNKS, store._chunks)
            resumed = await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial)
            assert_same(resumed, state())
            [fetched] = joiner.runtime.events.recent(StateFetched)
            assert fetched.event.reused_bytes == state().nbytes - CHUNK

        world.run(main)


class TestResume:
    @pytest.mark.parametrize("after", [0, 1, 10, 24])
    def test_a_broken_stream_is_resumed_where_it_broke(self, world: World, after: int) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            altering(donor, store, lambda i, chunk: chunk if i < after else None)
            partial = PartialSnapshot()
            with pytest.raises(TransferInterruptedError, match="broke off") as caught:
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial)
            assert caught.value.__cause__ is not None
            assert len(partial.missing) >= CHUNKS_IN_STATE - after
            kept = partial.done_bytes

            sent: list[int] = []
            altering(donor, store, lambda i, chunk: (sent.append(len(chunk)), chunk)[1])
            assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial), state())
            assert sum(sent) == state().nbytes - kept

        world.run(main)

    def test_a_donor_that_ends_the_stream_early(self, world: World) -> None:
        async def main() -> None:
            donor, _store, joiner = await pair(world)

            async def short(_: CallContext, stream: ByteStream) -> None:
                await stream.receive()
                await stream.send(state().chunk(0))

            donor.transport.serve_stream(CHUNKS, short)
            partial = PartialSnapshot()
            with pytest.raises(TransferInterruptedError, match="ended the stream before chunk 1"):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial)
            assert partial.done_bytes == CHUNK

        world.run(main)

    def test_from_another_donor_of_the_same_state(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            altering(donor, store, lambda i, chunk: chunk if i < 12 else None)
            partial = PartialSnapshot()
            with pytest.raises(TransferInterruptedError):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial)
            other = await world.endpoint()
            SnapshotStore(other).publish("trunk", state())
            kept = partial.done_bytes
            assert_same(await fetch_snapshot(joiner, other.contact, "trunk", timeout_s=20, resume=partial), state())
            [fetched] = joiner.runtime.events.recent(StateFetched)
            assert fetched.event.reused_bytes == kept

        world.run(main)

    def test_a_donor_that_stalls(self, world: World) -> None:
        async def main() -> None:
            donor, _store, joiner = await pair(world, IMPATIENT)

            async def stalling(context: CallContext, stream: ByteStream) -> None:
                await stream.receive()
                await stream.send(state().chunk(0))
                await asyncio.Event().wait()

            donor.transport.serve_stream(CHUNKS, stalling)
            partial = PartialSnapshot()
            with pytest.raises(TransferInterruptedError):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=30, resume=partial)
            assert partial.done_bytes == CHUNK
            with pytest.raises(TransferInterruptedError):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=0.2, resume=partial)

        world.run(main)

    def test_a_cancelled_download_leaves_what_arrived(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)

            async def halting(context: CallContext, stream: ByteStream) -> None:
                await stream.receive()
                for index in range(5):
                    await stream.send(state().chunk(index))
                await asyncio.Event().wait()

            donor.transport.serve_stream(CHUNKS, halting)
            partial = PartialSnapshot()
            download = asyncio.ensure_future(
                fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=30, resume=partial)
            )
            await eventually(lambda: partial.done_bytes >= CHUNK)
            download.cancel()
            with pytest.raises(asyncio.CancelledError):
                await download
            donor.transport.serve_stream(CHUNKS, store._chunks)
            assert partial.done_bytes >= CHUNK
            assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial), state())

        world.run(main)


@asynccontextmanager
async def halfway(world: World) -> AsyncIterator[tuple[Endpoint, SnapshotStore, Endpoint, asyncio.Task[Snapshot]]]:
    """A download that waits in the middle until the context ends."""
    donor, store, joiner = await pair(world)
    reached, go_on = asyncio.Event(), asyncio.Event()

    class Waiting(AlteringStream):
        async def send(self, chunk: bytes) -> None:
            await super().send(chunk)
            if self._count == 10:
                reached.set()
                await go_on.wait()

    async def handler(context: CallContext, stream: ByteStream) -> None:
        await store._chunks(context, Waiting(stream, lambda _, chunk: chunk))

    donor.transport.serve_stream(CHUNKS, handler)
    download = asyncio.ensure_future(fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=30))
    await reached.wait()
    yield donor, store, joiner, download
    go_on.set()


class TestReplacement:
    def test_a_running_download_ends_with_what_it_began(self, world: World) -> None:
        async def main() -> None:
            async with halfway(world) as (_, store, _, download):
                store.publish("trunk", state(8, weight=torch.zeros(64, 1568)))
                store.publish("trunk", state(9))
                store.withdraw("trunk")
            assert_same(await download, state())

        world.run(main)

    def test_a_snapshot_that_was_asked_about_is_served_after_its_replacement(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            described = await joiner.transport.call(donor.contact, DESCRIBE, pb.SnapshotRequest(key="trunk"))
            store.publish("trunk", state(8))
            assert len(await ask(joiner, donor, described.id, (0, 1))) == CHUNK
            store.publish("trunk", state(9))
            assert len(await ask(joiner, donor, described.id, (0, 1))) == CHUNK
            store.withdraw("trunk")
            with pytest.raises(SnapshotGoneError):
                await ask(joiner, donor, described.id, (0, 1))

        world.run(main)

    def test_a_snapshot_that_nobody_asked_about_is_dropped_at_once(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            first = state()
            store.publish("trunk", first)
            store.publish("trunk", state(8))
            with pytest.raises(SnapshotGoneError):
                await ask(joiner, donor, first.manifest.id, (0, 1))

        world.run(main)

    def test_a_lease_ends(self, memory_world: MemoryWorld) -> None:
        """Memory only: a minute passes."""

        async def main() -> None:
            donor, store, joiner = await pair(memory_world)
            described = await joiner.transport.call(donor.contact, DESCRIBE, pb.SnapshotRequest(key="trunk"))
            store.publish("trunk", state(8))
            await asyncio.sleep(LEASE_S - 5)
            assert await ask(joiner, donor, described.id, (0, 1))
            await asyncio.sleep(LEASE_S + 5)
            with pytest.raises(SnapshotGoneError):
                await ask(joiner, donor, described.id, (0, 1))

        memory_world.run(main)

    def test_unchanged_chunks_are_kept_for_the_next_snapshot(self, world: World) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            altering(donor, store, lambda i, chunk: chunk if i < 12 else None)
            partial = PartialSnapshot()
            with pytest.raises(TransferInterruptedError):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial)
            kept = partial.done_bytes
            donor.transport.serve_stream(CHUNKS, store._chunks)
            newer = state(8, step=torch.tensor(8))  # lies in the last chunk
            store.publish("trunk", newer)
            assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20, resume=partial), newer)
            [fetched] = joiner.runtime.events.recent(StateFetched)
            assert fetched.event.reused_bytes == kept > 0

        world.run(main)


async def ask(joiner: Endpoint, donor: Endpoint, snapshot_id: bytes, *ranges: tuple[int, int]) -> bytes:
    """Ask for chunks by hand; the first that comes."""
    request = pb.ChunksRequest(snapshot_id=snapshot_id, ranges=[pb.ChunkRange(first=f, count=c) for f, c in ranges])
    return await ask_raw(joiner, donor, request.SerializeToString())


async def ask_raw(joiner: Endpoint, donor: Endpoint, message: bytes) -> bytes:
    async with joiner.transport.stream(donor.contact, CHUNKS, timeout_s=20) as stream:
        await stream.send(message)
        await stream.finish()
        chunk = await stream.receive()
        assert chunk is not None
        return chunk


class TestHostileJoiner:
    def test_requests_that_make_no_sense_are_refused_and_the_donor_lives_on(self, world: World) -> None:
        async def main() -> None:
            donor, _store, joiner = await pair(world)
            known = state().manifest.id
            described = await joiner.transport.call(donor.contact, DESCRIBE, pb.SnapshotRequest(key="trunk"))
            assert described.id == known
            for message in (b"\xff\xff garbage", b"", pb.ChunksRequest(snapshot_id=b"short").SerializeToString()):
                with pytest.raises(MalformedFrameError):
                    await ask_raw(joiner, donor, message)
            for ranges in ([(25, 1)], [(0, 26)], [(0, 20), (0, 20)], [(0xFFFFFFFF, 1)], [(0, 0xFFFFFFFF)]):
                with pytest.raises(MalformedFrameError, match="beyond the 25"):
                    await ask(joiner, donor, known, *ranges)
            with pytest.raises(SnapshotGoneError):
                await ask(joiner, donor, bytes(32), (0, 1))
            assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20), state())

        world.run(main)

    def test_who_does_not_read_costs_the_donor_no_memory(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            donor, store, joiner = await pair(world)
            big = Snapshot.build({"x": torch.zeros(64 << 20, dtype=torch.uint8)}, {})
            store.publish("big", big)
            read: list[int] = []
            chunk = Snapshot.chunk
            monkeypatch.setattr(Snapshot, "chunk", lambda self, index: (read.append(index), chunk(self, index))[1])
            described = await joiner.transport.call(donor.contact, DESCRIBE, pb.SnapshotRequest(key="big"))
            async with joiner.transport.stream(donor.contact, CHUNKS, timeout_s=30) as stream:
                request = pb.ChunksRequest(snapshot_id=described.id, ranges=[pb.ChunkRange(first=0, count=64)])
                await stream.send(request.SerializeToString())
                await eventually(lambda: len(read) > 0)
                before = -1
                while before != len(read):  # until flow control holds the donor back
                    before = len(read)
                    await asyncio.sleep(0.2)
                assert len(read) < 32
                # Others are served meanwhile.
                assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20), state())
            monkeypatch.undo()

        world.run(main)

    def test_who_neither_asks_nor_reads_loses_the_turn(self, world: World) -> None:
        async def main() -> None:
            donor, _store, joiner = await pair(world, IMPATIENT)
            async with joiner.transport.stream(donor.contact, CHUNKS, timeout_s=30) as stream:
                with pytest.raises(SwarmError, match="Nothing was asked for"):
                    await stream.receive()

        world.run(main)

    def test_who_asks_for_too_many_downloads_at_once_is_refused(self, memory_world: MemoryWorld) -> None:
        """Memory only: opening this many streams takes long over TLS."""

        async def main() -> None:
            donor, store, joiner = await pair(memory_world)

            async def hold() -> None:
                async with joiner.transport.stream(donor.contact, CHUNKS, timeout_s=30) as stream:
                    await stream.receive()

            holding = [asyncio.ensure_future(hold()) for _ in range(MAX_QUEUED_PER_PEER)]
            await asyncio.sleep(2)
            with pytest.raises(RateLimitedError):
                await ask(joiner, donor, state().manifest.id, (0, 1))
            for task in holding:
                task.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
            await eventually(lambda: not store._queues)
            assert_same(await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20), state())

        memory_world.run(main)


class TestHostileDonor:
    def test_sizes_beyond_the_limits_are_refused_before_memory_is_taken(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def main() -> None:
            donor, _, joiner = await pair(world)
            calls: list[int] = []
            monkeypatch.setattr("swarm.state.snapshot.allocate", calls.append)
            with pytest.raises(FrameTooLargeError, match="at most 1000"):
                await fetch_snapshot(
                    joiner, donor.contact, "trunk", timeout_s=20, limits=Limits(max_payload_bytes=1000)
                )
            assert calls == []
            monkeypatch.undo()

        world.run(main)

    def test_a_manifest_that_lies(self, world: World) -> None:
        async def main() -> None:
            donor, _, joiner = await pair(world)

            async def lying(_: CallContext, __: pb.SnapshotRequest) -> pb.SnapshotManifest:
                message = state().manifest.to_pb()
                message.tensors[0].shape[0] = 63
                return message

            donor.transport.serve(DESCRIBE, lying)
            with pytest.raises(MalformedFrameError):
                await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20)

        world.run(main)


def test_many_downloads_at_once(world: World) -> None:
    async def main() -> None:
        donor, store, joiner = await pair(world)
        others = [joiner, await world.endpoint(), await world.endpoint()]
        for number in range(6):
            store.publish(f"expert/{number}", state(number))
        async with asyncio.TaskGroup() as group:
            downloads = [
                (number, group.create_task(fetch_snapshot(peer, donor.contact, f"expert/{number}", timeout_s=30)))
                for number in range(6)
                for peer in others
            ]
        for number, download in downloads:
            assert_same(download.result(), state(number))
        await eventually(lambda: not store._queues)

    world.run(main)


def test_publishing_from_another_thread(world: World) -> None:
    async def main() -> None:
        donor, store, joiner = await pair(world)
        await asyncio.to_thread(store.publish, "trunk", state(8))
        assert (await fetch_snapshot(joiner, donor.contact, "trunk", timeout_s=20)).metadata == {"step": 8}

    world.run(main)


def test_the_public_names_of_transfer() -> None:
    assert {"Snapshot", "SnapshotStore", "PartialSnapshot", "fetch_snapshot"} <= set(transfer.__all__)
