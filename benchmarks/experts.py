"""Calls to a remote expert against the same module in this process, and a small call against bare gRPC.

    python -m benchmarks.experts --json
    python -m benchmarks.experts --json --hivemind /path/to/python   # also hivemind, with its own interpreter

One host in a process of its own, one trainer here, over TLS on loopback. Remote and local calls alternate in blocks,
and medians are reported, because absolute times move with the machine's load. `both` is forward and backward with an
SGD step of the expert, on both sides. `concurrent`: the same host under 1, 2, 4 and 8 trainers; see `experts_load`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import swarm
from benchmarks import experts_device, experts_load
from benchmarks.experts_load import BATCH
from swarm.experts.registry import build_expert

HID = 1024
BATCHES = (4, 256, 2048)
SMALL_BATCH = 4
SMALL_BLOCK = 30
"""Small calls of one kind in a row."""
LR = 1e-6
BLOCK_S = 0.06
"""Time that one block of calls takes about, so that cheap calls are measured more often."""

PATIENT = {"client": {"deadline": {"initial_s": 60.0, "floor_s": 60.0, "cap_s": 120.0}}}
"""A machine busy with other things must not turn a slow call into a failed one."""


def grids() -> list[swarm.ExpertGrid]:
    optimizer = swarm.OptimizerSpec("sgd", lr=LR)
    return [
        swarm.ExpertGrid(name, name, config={"hid": HID}, replicas=1, optimizer=optimizer) for name in ("nop", "ffn")
    ]


class Timings:
    """Times of alternating activities, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def block(self, name: str, action: Callable[[], object], seconds: float = BLOCK_S) -> None:
        """Repeat an action for about this long, at least once."""
        times = self.seconds.setdefault(name, [])
        end = time.perf_counter() + seconds
        while True:
            begun = time.perf_counter()
            action()
            now = time.perf_counter()
            times.append(now - begun)
            if now >= end:
                return

    def ms(self, name: str) -> float:
        return round(statistics.median(self.seconds[name]) * 1e3, 3)


def forward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            module(x)

    return run


def both(module: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None) -> Callable[[], object]:
    def run() -> None:
        x.grad = None
        module(x).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure_case(peer: swarm.Peer, grid: swarm.ExpertGrid, batch: int, rounds: int) -> dict[str, Any]:
    remote, local = swarm.RemoteExpert(peer, grid.name), build_expert(grid, grid.name, peer.run_id)
    parameters = list(local.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR) if parameters else None
    x = torch.randn(batch, HID, requires_grad=True)
    actions = {
        "forward_local_ms": forward(local, x),
        "forward_ms": forward(remote, x),
        "both_local_ms": both(local, x, optimizer),
        "both_ms": both(remote, x, None),
    }
    for action in actions.values():
        for _ in range(2):
            action()
    timings = Timings()
    for _ in range(rounds):
        for name, action in actions.items():
            timings.block(name, action)
    stats = remote.stats
    result: dict[str, Any] = {"expert": grid.name, "hid": HID, "batch": batch}
    result |= {name: timings.ms(name) for name in ("forward_ms", "forward_local_ms", "both_ms", "both_local_ms")}
    result["forward_ratio"] = round(result["forward_ms"] / max(result["forward_local_ms"], 1e-3), 3)
    result["both_ratio"] = round(result["both_ms"] / max(result["both_local_ms"], 1e-3), 3)
    assert stats.failed_calls == 0, f"calls failed: {stats}"
    assert stats.lost_updates == 0, f"updates were lost: {stats}"
    return result


# A bare TLS server in another process, as small as gRPC allows


def self_signed() -> tuple[bytes, bytes]:
    """Key and certificate of `localhost`, PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)


def serve_bare() -> None:
    """Read key and certificate from standard input, echo unary calls, end with standard input."""
    import grpc

    keys = json.loads(sys.stdin.readline())

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler("bare.Bare", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
        server.add_generic_rpc_handlers((handler,))
        credentials = grpc.ssl_server_credentials([(keys["key"].encode(), keys["certificate"].encode())])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        print(port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await server.stop(0)

    asyncio.run(serve())


def measure_small_call(peer: swarm.Peer, rounds: int) -> dict[str, Any]:
    """A small expert call from this thread against bare unary echoes of the same payload on the event loop."""
    import grpc

    key, certificate = self_signed()
    command = [sys.executable, "-m", "benchmarks.experts", "--serve-bare"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    times: list[float] = []
    channels: list[grpc.aio.Channel] = []
    payload = bytes(SMALL_BATCH * HID * 4)

    async def connect(port: int) -> None:
        options = (("grpc.ssl_target_name_override", "localhost"),)
        credentials = grpc.ssl_channel_credentials(certificate)
        channels.append(grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options))

    async def bare(n: int) -> None:
        call = channels[0].unary_unary("/bare.Bare/Echo")
        for _ in range(n):
            begun = time.perf_counter()
            await call(payload, timeout=5.0)
            times.append(time.perf_counter() - begun)

    try:
        child.stdin.write(json.dumps({"key": key.decode(), "certificate": certificate.decode()}) + "\n")
        child.stdin.flush()
        peer.run_sync(connect(int(child.stdout.readline())))
        remote, x = swarm.RemoteExpert(peer, "nop"), torch.randn(SMALL_BATCH, HID)
        action, timings = forward(remote, x), Timings()
        peer.run_sync(bare(20))
        for _ in range(20):
            action()
        times.clear()
        for _ in range(4 * rounds):
            peer.run_sync(bare(SMALL_BLOCK))
            for _ in range(SMALL_BLOCK):
                timings.block("small", action, 0.0)
        peer.run_sync(channels[0].close())
    finally:
        child.stdin.close()
        child.wait(10.0)
    # neighbouring blocks are compared, so that a load that drifts cancels out
    blocks = zip(_block_medians(timings.seconds["small"]), _block_medians(times), strict=True)
    return {
        "small_call_ms": timings.ms("small"),
        "bare_unary_ms": round(statistics.median(times) * 1e3, 3),
        "small_call_ratio": round(statistics.median(small / bare for small, bare in blocks), 3),
    }


def _block_medians(seconds: list[float]) -> list[float]:
    return [statistics.median(seconds[i : i + SMALL_BLOCK]) for i in range(0, len(seconds), SMALL_BLOCK)]


def measure_hivemind(python: str) -> list[dict[str, Any]]:
    """The cases on hivemind, in its own environment."""
    script = Path(__file__).with_name("anchors") / "hivemind_experts.py"
    results = []
    for name in ("nop", "ffn"):
        for batch in BATCHES:
            done = subprocess.run(
                [python, str(script), name, str(HID), str(batch)], capture_output=True, text=True, timeout=300
            )
            if done.returncode:
                raise SystemExit(f"hivemind failed on {name} with batch {batch}:\n{done.stderr[-2000:]}")
            results.append(
                json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each kind per case")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the host and of the local module")
    parser.add_argument("--hivemind", metavar="PYTHON", help="also measure hivemind, with this interpreter")
    parser.add_argument("--device", help="only this: experts on a device, e.g. cuda (see `experts_device`)")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bare:
        serve_bare()
        return
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if options.device:
        figures = experts_device.measure(options.device, PATIENT)
        print(json.dumps(figures) if options.json else "\n".join(map(str, [figures["device"], *figures["cases"]])))
        return
    result: dict[str, Any] = {
        "benchmark": "experts",
        "threads": options.threads,
        "both_includes": "an SGD step of the expert, on both sides",
    }
    made = grids()
    with (
        swarm.LocalSwarm(experts=made, hosts=1, torch_threads=options.threads, config=PATIENT) as local,
        local.peer(role="trainer") as peer,
    ):
        for grid in made:
            peer.wait_for_experts(grid.name, timeout_s=60.0)
        result |= measure_small_call(peer, options.rounds)
        result["cases"] = [measure_case(peer, grid, batch, options.rounds) for grid in made for batch in BATCHES]
    passes_s = [c["both_local_ms"] * 1e-3 for c in result["cases"] if (c["expert"], c["batch"]) == ("ffn", BATCH)]
    result["concurrent"] = experts_load.measure(PATIENT, passes_s[0])
    if options.hivemind:
        result["hivemind"] = measure_hivemind(options.hivemind)
    if options.json:
        print(json.dumps(result))
        return
    print(", ".join(f"{name} {result[name]}" for name in ("small_call_ms", "bare_unary_ms", "small_call_ratio")))
    for case in result["cases"]:
        print(case)
    for case in result["concurrent"]:
        print(case)
    for case in result.get("hivemind", ()):
        print("hivemind", case)


if __name__ == "__main__":
    main()
