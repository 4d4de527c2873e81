"""Minutes of new random input for everything that reads bytes from the network. `SWARM_FUZZ_S` sets the seconds a test.

    pytest tests/long

Every run draws new inputs; a failure names the seed, which `SWARM_FUZZ_SEED` repeats.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from collections.abc import Callable

import msgpack
import pytest
import torch

from swarm.errors import MalformedFrameError, SwarmError
from swarm.experts.protocol import CallRequest, CallResponse, PartRequest, RequestIds
from swarm.identity import KeyPair
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.runs.credentials import Credential
from swarm.runs.invite import Invite
from swarm.runs.manifest import Manifest
from swarm.runtime import TaskFailed
from swarm.tensors.codecs import codec
from swarm.tensors.wire import Limits, from_frame, to_frame
from tests.averaging_fuzz import AveragingFuzz
from tests.fuzzing import DhtFuzz, damaged, rounds
from tests.support import MemoryWorld

SECONDS = float(os.environ.get("SWARM_FUZZ_S", "60"))
LIMITS = Limits(max_header_bytes=1 << 16, max_tensors=64, max_payload_bytes=1 << 20)
KEY = KeyPair.from_private_bytes(bytes(32))
INVITE = Invite.issue(KEY, [Contact(KEY.peer_id, ("127.0.0.1:1",))], [Role.HOST], None, wall_s=0.0)
REQUEST = CallRequest("backward", (PartRequest("ffn.0", RequestIds().next(), 2, apply=True, with_inputs=True),))


def read_frame(data: bytes) -> None:
    meta, tensors = from_frame(data, LIMITS)
    assert sum(t.nbytes for t in tensors) <= LIMITS.max_payload_bytes
    for parse in (CallRequest.from_meta, CallResponse.from_meta):
        with contextlib.suppress(SwarmError):
            parse(meta)


def read_meta(data: bytes) -> None:
    try:
        meta = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedFrameError("no msgpack") from error  # as the frame's reader says it
    if not isinstance(meta, dict):
        raise MalformedFrameError("no table")
    CallRequest.from_meta(meta)


def decode(name: str, numel: int) -> Callable[[bytes], object]:
    """Reads the bytes of one chunk: decodes them, and adds them to a sum."""

    def read(data: bytes) -> None:
        values = codec(name).decode(data, (numel,), torch.float32)
        acc = torch.zeros(numel)
        codec(name).decode_add(torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.float32, acc)
        assert torch.equal(torch.isfinite(values), torch.isfinite(acc))

    return read


def chunk(name: str, numel: int) -> tuple[Callable[[bytes], object], bytes]:
    return decode(name, numel), bytes(codec(name).encode(torch.linspace(-1, 1, numel)))


READERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "frames": (read_frame, to_frame(REQUEST.to_meta(), [torch.ones(7), torch.zeros(2, 3, dtype=torch.bfloat16)])),
    "call headers": (read_meta, msgpack.packb(REQUEST.to_meta())),
    "credentials": (lambda d: Credential.verify(d, KEY.public_key), INVITE.credential(KEY).encoded),
    "invites": (lambda d: Invite.decode(d.decode("latin-1"), wall_s=0.0), INVITE.encode().encode()),
    "chunks of int8": chunk("int8", 9000),
    "chunks of int4": chunk("int4", 300),
    "chunks of topk": chunk("topk:512", 4500),
    "frames of lossy codecs": (
        read_frame,
        to_frame(REQUEST.to_meta(), [torch.linspace(-1, 1, 5000)] * 3, ["int8", "int4", "topk"]),
    ),
    "manifests": (
        lambda d: Manifest.verify(d, INVITE.ticket.run_id),
        Manifest("fuzz", KEY.public_key).sign(KEY),
    ),
}


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("what", sorted(READERS))
def test_damaged_input_ends_in_a_typed_error(what: str) -> None:
    read, good = READERS[what]
    read(good)
    seed = int(os.environ.get("SWARM_FUZZ_SEED") or secrets.randbits(48))
    rng = random.Random(seed)
    refused = tried = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        tried += 1
        data = damaged(good, rng)
        try:
            read(data)
        except SwarmError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {tried}: {data!r}") from error
    assert refused > 0.2 * tried, f"seed {seed}: the inputs are hardly damaged"


@pytest.mark.timeout(SECONDS + 60)
def test_damaged_dht_messages_end_in_a_typed_error(memory_world: MemoryWorld) -> None:
    seed = int(os.environ.get("SWARM_FUZZ_SEED") or secrets.randbits(48))
    rng = random.Random(seed)

    async def main() -> None:
        fuzz = DhtFuzz(memory_world)
        await fuzz.open()
        end = time.monotonic() + SECONDS
        refused = tried = 0
        while time.monotonic() < end:
            try:
                more, bad = await rounds(fuzz, rng, 50)
            except Exception as error:
                raise AssertionError(f"seed {seed}, after {tried} messages") from error
            tried, refused = tried + more, refused + bad
        assert refused > 0.1 * tried, f"seed {seed}: the messages are hardly damaged"
        assert await fuzz.still_well(), f"seed {seed}"
        for peer in (fuzz.victim, fuzz.liar):
            assert not peer.runtime.events.recent(TaskFailed), f"seed {seed}"

    memory_world.run(main, timeout_s=SECONDS + 50)


@pytest.mark.timeout(SECONDS + 120)
def test_damaged_averaging_messages_harm_nobody(memory_world: MemoryWorld) -> None:
    seed = int(os.environ.get("SWARM_FUZZ_SEED") or secrets.randbits(48))

    async def main() -> None:
        fuzz = AveragingFuzz(memory_world, random.Random(seed))
        await fuzz.open()
        end = time.monotonic() + SECONDS
        try:
            while time.monotonic() < end:
                await fuzz.rounds(20)
                fuzz.check()
            assert await fuzz.well()
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {fuzz.tried} messages") from error

    memory_world.run(main, timeout_s=SECONDS + 100)
