"""What the transport costs: small calls and tensor echoes against bare gRPC and raw TCP, in one run.

    python -m benchmarks.transport [--json]

The serving side is a process of its own. Both sides of every ratio are measured in turn, round by round, in the same
two processes, with the same 64 MiB of data; figures are medians, and ratios medians of the ratios within a round. An
echo counts both ways. The tensor echo sends frames of `--frame-mib` and takes each back while it sends the next,
through session, TLS and framing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from swarm.config import KIB, MIB, PeerConfig
from swarm.identity import KeyPair, PeerId
from swarm.net.grpc import GrpcTransport
from swarm.net.loop import loop_thread, switch_interval
from swarm.net.security import OpenAuthorizer
from swarm.net.tls import PinnedCertificate, TlsIdentity, fetch_certificate
from swarm.net.transport import ByteStream, CallContext, Contact, StreamMethod, UnaryMethod
from swarm.roles import ALL_ROLES
from swarm.runtime import Runtime
from swarm.tensors.streaming import receive_tensors, send_tensors

import grpc  # isort: skip  # after swarm, which sets gRPC up
from grpc import aio  # isort: skip

ROOT = Path(__file__).parents[1]
TOTAL_BYTES = 64 * MIB
SMALL_BYTES = 16 * KIB
RUN_ID = b"transport benchmark".ljust(32)
CALL: UnaryMethod[bytes, bytes] = UnaryMethod("/swarm.pb.Benchmark/Call", bytes, bytes)
ECHO = StreamMethod("/swarm.pb.Benchmark/Echo")
BARE_CALL, BARE_ECHO = "/bare/Call", "/bare/Echo"
BARE_OPTIONS = [("grpc.max_receive_message_length", 8 * MIB), ("grpc.max_send_message_length", -1)]


def transport() -> GrpcTransport:
    return GrpcTransport(KeyPair.generate(), OpenAuthorizer(RUN_ID, ALL_ROLES), PeerConfig.preset("local"), Runtime())


# -- the serving process -------------------------------------------------------------------------------------------


class _Bare(grpc.GenericRpcHandler):
    """The same two methods on bare `grpc.aio`, raw bytes, no session."""

    def __init__(self) -> None:
        async def call(request: bytes, context: Any) -> bytes:
            return request

        async def echo(_: Any, context: Any) -> None:
            while (chunk := await context.read()) is not aio.EOF:
                await context.write(chunk)

        self._handlers = {
            BARE_CALL: grpc.unary_unary_rpc_method_handler(call),
            BARE_ECHO: grpc.stream_stream_rpc_method_handler(echo),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method)


def _echo_sockets(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        buffer = bytearray(MIB)
        with connection:
            while count := connection.recv_into(buffer):
                connection.sendall(memoryview(buffer)[:count])


async def _serve() -> dict[str, Any]:
    server = transport()

    async def call(context: CallContext, request: bytes) -> bytes:
        return request

    async def echo(context: CallContext, stream: ByteStream) -> None:
        frames: asyncio.Queue[tuple[dict[str, Any], list[torch.Tensor]]] = asyncio.Queue(2)

        async def receive() -> None:
            left = 1
            while left:
                await frames.put(frame := await receive_tensors(stream, server.runtime))
                left = frame[0]["left"]

        async def send() -> None:
            left = 1
            while left:
                meta, tensors = await frames.get()
                await send_tensors(stream, server.runtime, meta, tensors)
                left = meta["left"]

        async with asyncio.TaskGroup() as group:
            group.create_task(receive())
            group.create_task(send())

    server.serve(CALL, call)
    server.serve_stream(ECHO, echo)
    await server.start()
    identity = KeyPair.generate()
    tls = TlsIdentity.generate(identity)
    bare = aio.server(options=BARE_OPTIONS)
    bare.add_generic_rpc_handlers((_Bare(),))
    port = bare.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(tls.key_pem, tls.certificate.pem)]))
    await bare.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_echo_sockets, args=(listener,), daemon=True).start()
    _KEPT.extend([server, bare])
    return {
        "peer": str(server.peer_id),
        "address": server.contact.addresses[0],
        "bare_peer": str(identity.peer_id),
        "bare_port": port,
        "tcp_port": listener.getsockname()[1],
    }


_KEPT: list[Any] = []


async def _stop() -> None:
    server, bare = _KEPT
    await server.close(0)
    await bare.stop(0)


def serve() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    with switch_interval():
        print(json.dumps(loop_thread().run(_serve())), flush=True)
        sys.stdin.read()
        loop_thread().run(_stop())


# -- the measuring process -----------------------------------------------------------------------------------------


async def _time_calls(call: Callable[[], Awaitable[Any]], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


async def _tensor_echo(client: GrpcTransport, to: Contact, frames: list[list[torch.Tensor]]) -> float:
    began = time.perf_counter()
    async with client.stream(to, ECHO, timeout_s=60) as stream, asyncio.TaskGroup() as group:

        async def send() -> None:
            for number, frame in enumerate(frames):
                await send_tensors(stream, client.runtime, {"left": len(frames) - number - 1}, frame)
            await stream.finish()

        group.create_task(send())
        received = 0
        for _ in frames:
            received += sum(t.nbytes for t in (await receive_tensors(stream, client.runtime))[1])
    assert received == TOTAL_BYTES
    return 2 * TOTAL_BYTES / (time.perf_counter() - began) / 1e6


async def _bare_echo(channel: aio.Channel, chunks: list[bytes]) -> float:
    began = time.perf_counter()
    call: Any = channel.stream_stream(BARE_ECHO)()

    async def send() -> None:
        for chunk in chunks:
            await call.write(chunk)
        await call.done_writing()

    sending = asyncio.create_task(send())
    received = 0
    while (part := await call.read()) is not aio.EOF:
        received += len(part)
    await sending
    assert received == TOTAL_BYTES
    return 2 * TOTAL_BYTES / (time.perf_counter() - began) / 1e6


def _tcp_echo(port: int, chunks: list[bytes]) -> float:
    buffer, received = bytearray(MIB), 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.perf_counter()

        def send() -> None:
            for chunk in chunks:
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send)
        sending.start()
        while count := connection.recv_into(buffer):
            received += count
        sending.join()
        taken = time.perf_counter() - began
    assert received == TOTAL_BYTES
    return 2 * TOTAL_BYTES / taken / 1e6


async def _measure(server: dict[str, Any], rounds: int, calls: int, frame_bytes: int) -> dict[str, float]:
    client = transport()
    await client.start()
    to = Contact(PeerId.parse(server["peer"]), (server["address"],))
    pinned: PinnedCertificate = await fetch_certificate("127.0.0.1", server["bare_port"], None)
    bare = aio.secure_channel(
        f"127.0.0.1:{server['bare_port']}",
        grpc.ssl_channel_credentials(pinned.pem),
        options=[*BARE_OPTIONS, ("grpc.ssl_target_name_override", server["bare_peer"])],
    )
    bare_call = bare.unary_unary(BARE_CALL)
    small = bytes(SMALL_BYTES)
    per_tensor = MIB // 4
    frames = [[torch.randn(per_tensor) for _ in range(frame_bytes // MIB)] for _ in range(TOTAL_BYTES // frame_bytes)]
    chunks = [tensor.numpy().tobytes() for frame in frames for tensor in frame]
    figures: dict[str, list[float]] = {
        name: [] for name in ("small_call_ms", "bare_unary_ms", "echo_mb_s", "bare_grpc_echo_mb_s", "raw_tcp_echo_mb_s")
    }
    await client.call(to, CALL, small)
    for number in range(rounds + 1):
        measured = {
            "small_call_ms": await _time_calls(lambda: client.call(to, CALL, small), calls),
            "bare_unary_ms": await _time_calls(lambda: bare_call(small), calls),
            "echo_mb_s": await _tensor_echo(client, to, frames),
            "bare_grpc_echo_mb_s": await _bare_echo(bare, chunks),
            "raw_tcp_echo_mb_s": await asyncio.to_thread(_tcp_echo, server["tcp_port"], chunks),
        }
        for name, value in measured.items():
            if number:  # the first round warms up
                figures[name].append(value)
    await bare.close()
    await client.close()
    result = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    result["small_call_ratio"] = _paired(figures["small_call_ms"], figures["bare_unary_ms"])
    result["echo_ratio"] = _paired(figures["echo_mb_s"], figures["bare_grpc_echo_mb_s"])
    return result


def _paired(ours: list[float], bare: list[float]) -> float:
    """Median over rounds of the ratio within a round, so that a load that drifts between rounds cancels out."""
    return round(statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 3)


def run(rounds: int = 15, calls: int = 200, frame_mib: int = 32) -> dict[str, float]:
    """Start the serving process, measure, end it; returns the figures."""
    torch.set_num_threads(1)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport", "--serve"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        server = json.loads(child.stdout.readline())
        with switch_interval():
            return loop_thread().run(_measure(server, rounds, calls, frame_mib * MIB), timeout_s=300)
    finally:
        child.stdin.close()
        child.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200, help="small calls per round")
    parser.add_argument("--frame-mib", type=int, default=32, help="tensors per frame of the echo, in MiB")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    result = run(arguments.rounds, arguments.calls, arguments.frame_mib)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:22} {value:10.3f}")


if __name__ == "__main__":
    main()
