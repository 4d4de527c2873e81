"""All-reduce between peer processes on this machine, next to gloo and, if its Python is given, hivemind.

    python -m benchmarks.averaging --json --peers 4 --mb 100 [--rounds 7] [--hivemind /path/to/python]

One process per peer, torch on one thread, loopback, TLS. A round's time is that of its slowest peer, from the sealed
group to the last chunk; the figures are medians over rounds. `*_step_s` counts group forming and copies as well. gloo
is plaintext.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARK_TIMEOUT_S = 300.0


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def barrier(folder: Path, name: str, rank: int, count: int) -> None:
    """Wait until `count` processes are here."""
    (folder / f"{name}.{rank}").touch()
    deadline = time.monotonic() + BENCHMARK_TIMEOUT_S
    while sum(entry.startswith(name + ".") for entry in os.listdir(folder)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other processes did not reach {name}")
        time.sleep(0.002)


def run_peer(folder: Path, rank: int, count: int, numel: int, rounds: int, codec: str) -> None:
    """One peer process: averages `numel` fp32 values `rounds` times and writes its times."""
    from swarm.net.loop import disable_grpc_fork_handlers, loop_thread, switch_interval

    disable_grpc_fork_handlers()
    import torch

    from swarm.averaging.allreduce import AllReduce
    from swarm.averaging.averager import Averager
    from swarm.averaging.service import AveragingService
    from swarm.config import PeerConfig
    from swarm.dht.node import Dht
    from swarm.endpoint import Endpoint
    from swarm.identity import KeyPair
    from swarm.net.grpc import GrpcTransport
    from swarm.net.security import OpenAuthorizer
    from swarm.roles import ALL_ROLES
    from swarm.runtime import Runtime

    torch.set_num_threads(1)
    run_id = hashlib.sha256(b"benchmark").digest()
    config = PeerConfig.preset("local", averaging={"matchmaking_s": 10.0, "round_timeout_s": 60.0})
    runtime, identity = Runtime(), KeyPair.generate()

    async def start() -> Endpoint:
        transport = GrpcTransport(identity, OpenAuthorizer(run_id, ALL_ROLES), config, runtime)
        await transport.start()
        dht = Dht(transport, config.dht, runtime)
        await dht.start()
        address = folder / "address"
        if rank == 0:
            part = folder / "address.part"
            part.write_text(f"{transport.contact.addresses[0]}")
            part.rename(address)
        else:
            while not address.exists():
                await asyncio.sleep(0.01)
            await dht.bootstrap([await transport.dial(address.read_text())])
        return Endpoint(
            run_id=run_id,
            roles=ALL_ROLES,
            identity=identity,
            config=config,
            runtime=runtime,
            transport=transport,
            dht=dht,
            loop=loop_thread(),
        )

    with switch_interval():
        endpoint = loop_thread().run(start())

        class Peer:
            averaging = AveragingService(endpoint)

        values = torch.full((numel,), float(rank)) + torch.randn(numel) * 0.01
        averager = Averager(Peer(), [values], "bench", AllReduce(min_group=count, max_group=count, codec=codec))
        exchange_s, step_s, cpu_s, ok = [], [], [], 0
        for index in range(rounds + 1):
            barrier(folder, f"round{index}", rank, count)
            started, cpu = time.perf_counter(), time.process_time()
            result = averager.step()
            if index:  # the first round also connects
                step_s.append(time.perf_counter() - started)
                cpu_s.append(time.process_time() - cpu)
                exchange_s.append(result.exchange_s)
                ok += result.averaged and not result.degraded
        digest = hashlib.sha256(values.numpy().data).hexdigest()
        report = {
            "exchange_s": exchange_s,
            "step_s": step_s,
            "cpu_s": cpu_s,
            "ok": ok,
            "digest": digest,
            "mean": float(values.mean()),
        }
        (folder / f"out.{rank}").write_text(json.dumps(report))
        barrier(folder, "end", rank, count)
        averager.close()

        async def stop() -> None:
            await endpoint.dht.close()
            await endpoint.transport.close()

        loop_thread().run(stop())


def measure(count: int, numel: int, rounds: int, codec: str) -> dict[str, float]:
    """Medians over rounds of the slowest peer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [name, str(count), str(numel), str(rounds), codec]
        command = [sys.executable, "-m", "benchmarks.averaging", "--peer"]
        peers = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(count)]
        try:
            codes = [peer.wait(BENCHMARK_TIMEOUT_S) for peer in peers]
        finally:
            for peer in peers:
                peer.kill()
        if any(codes):
            raise SystemExit(f"A peer process failed: exit codes {codes}")
        reports: list[dict[str, Any]] = [json.loads((folder / f"out.{rank}").read_text()) for rank in range(count)]
    if any(report["ok"] != rounds for report in reports):
        raise SystemExit(f"Some rounds were not complete: {[r['ok'] for r in reports]} of {rounds}.")
    if len({report["digest"] for report in reports}) != 1:
        raise SystemExit("The peers hold different bits after the last round.")
    return {
        "exchange_s": median([max(r["exchange_s"][i] for r in reports) for i in range(rounds)]),
        "step_s": median([max(r["step_s"][i] for r in reports) for i in range(rounds)]),
        "cpu_s": median([sum(r["cpu_s"][i] for r in reports) for i in range(rounds)]),
    }


def run_anchor(python: str, module: str, *arguments: object) -> float:
    """Seconds per round that an anchor script prints."""
    script = Path(__file__).parent / "anchors" / f"{module}.py"
    done = subprocess.run(
        [python, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=BENCHMARK_TIMEOUT_S,
        check=True,
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["allreduce_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line only")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=100.0, help="megabytes (1e6) of fp32 per peer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of an environment with hivemind")
    options = parser.parse_args()
    numel = int(options.mb * 1e6 / 4)
    shape = (options.peers, numel, options.rounds)
    fp32, bf16 = measure(*shape, "none"), measure(*shape, "bf16")
    gloo_s = run_anchor(sys.executable, "gloo_allreduce", *shape)
    figures: dict[str, Any] = {
        "peers": options.peers,
        "mb": options.mb,
        "rounds": options.rounds,
        "fp32_s": fp32["exchange_s"],
        "bf16_s": bf16["exchange_s"],
        "gloo_s": gloo_s,
        "bf16_to_gloo": bf16["exchange_s"] / gloo_s,
        "fp32_to_gloo": fp32["exchange_s"] / gloo_s,
        "fp32_step_s": fp32["step_s"],
        "bf16_step_s": bf16["step_s"],
        "fp32_cpu_s": fp32["cpu_s"],
        "bf16_cpu_s": bf16["cpu_s"],
    }
    if options.hivemind:
        for ours, theirs, codec in ((fp32, "fp32", "none"), (bf16, "fp16", "fp16")):
            seconds = run_anchor(options.hivemind, "hivemind_averaging", *shape, codec)
            figures[f"hivemind_{theirs}_s"] = seconds
            figures[f"faster_than_hivemind_{theirs}"] = seconds / ours["exchange_s"]
    figures = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    if options.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:28} {value}")


if __name__ == "__main__":
    if "--peer" in sys.argv[1:2]:
        _, _, rank, name, count, numel, rounds, codec = sys.argv
        run_peer(Path(name), int(rank), int(count), int(numel), int(rounds), codec)
    else:
        main()
