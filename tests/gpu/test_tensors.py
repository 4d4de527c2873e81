"""CUDA tensors: framing, codecs, snapshots and flat vectors take them as they take tensors on the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from swarm.net.transport import ByteStream
from swarm.runtime import Runtime
from swarm.state.checkpoint import load_checkpoint, save_checkpoint
from swarm.state.transfer import Snapshot
from swarm.tensors.partition import flatten, unflatten
from swarm.tensors.schema import DTYPES, check_finite, is_finite
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import encode, from_frame, to_frame

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_travels(name: str) -> None:
    raw = torch.randint(0, 2, (24 * DTYPES[name].itemsize,), dtype=torch.uint8, device=DEVICE)
    tensor = raw.view(DTYPES[name]).view(4, 6)
    _, [received, turned] = from_frame(to_frame({}, [tensor, tensor.t()]))
    assert received.device.type == "cpu"
    assert torch.equal(received.view(torch.uint8), tensor.cpu().view(torch.uint8))
    assert torch.equal(turned.contiguous().view(torch.uint8), tensor.t().contiguous().cpu().view(torch.uint8))


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
def test_codecs_agree_with_the_cpu(codec: str) -> None:
    tensor = torch.randn(300_000, device=DEVICE)
    tensor[7] = 1e38
    from_cuda = b"".join(encode({}, [tensor], codec, chunk_bytes=100_000))
    assert from_cuda == b"".join(encode({}, [tensor.cpu()], codec, chunk_bytes=100_000))
    assert torch.isfinite(from_frame(from_cuda)[1][0]).all()


def test_streaming_leaves_the_loop_free() -> None:
    class Queue(ByteStream):
        def __init__(self) -> None:
            self.queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def send(self, chunk: bytes) -> None:
            self.queue.put_nowait(chunk)

        async def finish(self) -> None:
            pass

        async def receive(self) -> bytes | None:
            return await self.queue.get()

    async def main() -> None:
        stream, tensor = Queue(), torch.randn(2_000_000, device=DEVICE)
        await send_tensors(stream, Runtime(), {}, [tensor])
        _, [received] = await receive_tensors(stream, Runtime())
        assert torch.equal(received, tensor.cpu())

    asyncio.run(main())


def test_snapshots_and_checkpoints(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(50, 40, device=DEVICE, requires_grad=True), "step": torch.tensor(3, device=DEVICE)}
    host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    assert Snapshot.build(tensors, {}).id == Snapshot.build(host, {}).id
    save_checkpoint(tmp_path, tensors, {})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in host.items())


def test_flat_vectors_and_finite_checks() -> None:
    tensors = [torch.randn(3, 4, device=DEVICE), torch.ones(5, device=DEVICE).half()]
    parts = unflatten(flatten(tensors), tensors)
    assert all(torch.equal(part, tensor.float().cpu()) for part, tensor in zip(parts, tensors, strict=True))
    check_finite(tensors[0], "input")
    assert not is_finite(torch.tensor([1.0, float("nan")], device=DEVICE))
