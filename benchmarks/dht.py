"""DHT put and get over real gRPC peers on this machine, next to hivemind if its Python is given.

    python -m benchmarks.dht --json --peers 16 [--ops 200] [--bulk 4000] [--hivemind /path/to/python]

Sequentially: a random peer puts a small value under a new key, another random peer gets it; medians in milliseconds.
Both calls are made from the main thread through the synchronous facade, as hivemind's are. All our peers live in this
process on its one event loop, so that the client and all replicas of a call share one core; hivemind's are processes.
`--bulk` measures besides how long one put and one get of so many keys take.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from swarm.net.loop import disable_grpc_fork_handlers, loop_thread, switch_interval

disable_grpc_fork_handlers()

from swarm.config import PeerConfig  # noqa: E402 - the fork handlers come first
from swarm.dht import Dht, Put  # noqa: E402
from swarm.identity import KeyPair  # noqa: E402
from swarm.net.grpc import GrpcTransport  # noqa: E402
from swarm.net.security import OpenAuthorizer  # noqa: E402
from swarm.roles import ALL_ROLES  # noqa: E402
from swarm.runtime import Runtime  # noqa: E402

RUN_ID = hashlib.sha256(b"benchmark").digest()
WARM_UP = 20


async def start_peers(count: int) -> list[tuple[Dht, GrpcTransport]]:
    """Peers that joined one after the other through up to four earlier ones."""
    config = PeerConfig.preset("local")
    peers: list[tuple[Dht, GrpcTransport]] = []
    for _ in range(count):
        runtime = Runtime()
        transport = GrpcTransport(KeyPair.generate(), OpenAuthorizer(RUN_ID, ALL_ROLES), config, runtime)
        await transport.start()
        dht = Dht(transport, config.dht, runtime)
        await dht.start()
        await dht.bootstrap([t.contact for _, t in random.sample(peers, min(4, len(peers)))])
        peers.append((dht, transport))
    return peers


async def stop_peers(peers: list[tuple[Dht, GrpcTransport]]) -> None:
    for dht, _ in peers:
        await dht.close()
    await asyncio.gather(*(transport.close(grace_s=0.1) for _, transport in peers))


def measure_bulk(peers: list[tuple[Dht, GrpcTransport]], keys: int) -> dict[str, Any]:
    """One put and one get of many keys."""
    run = loop_thread().run
    (writer, _), (reader, _) = random.sample(peers, 2)
    puts = [Put(f"bulk/{i}", i, 300.0, renew=False) for i in range(keys)]
    begun, cpu = time.perf_counter(), time.process_time()
    holders = run(writer.put_many(puts), 300.0)
    middle = time.perf_counter()
    found = run(reader.get_many([put.key for put in puts]), 300.0)
    end = time.perf_counter()
    return {
        "bulk_keys": keys,
        "bulk_found": sum([e.body for e in found[put.key]] == [put.body] for put in puts),
        "bulk_fewest_holders": min(holders),
        "bulk_put_s": round(middle - begun, 3),
        "bulk_get_s": round(end - middle, 3),
        "bulk_cpu_s": round(time.process_time() - cpu, 3),
    }


def measure(count: int, ops: int, bulk: int) -> dict[str, Any]:
    """Medians over `ops` puts and gets; the first ones, during which peers connect, are left out."""
    random.seed(0)
    run = loop_thread().run
    put_s: list[float] = []
    get_s: list[float] = []
    ok = calls = 0
    many: dict[str, Any] = {}
    peers = run(start_peers(count), 60.0)
    try:
        with switch_interval():
            for i in range(WARM_UP + ops):
                key, value = uuid.uuid4().hex, uuid.uuid4().hex
                (writer, _), (reader, _) = random.sample(peers, 2)
                before = sum(t.stats.calls_made for _, t in peers)
                begun = time.perf_counter()
                run(writer.put(key, value, subkey="s", ttl_s=300), 10.0)
                middle = time.perf_counter()
                entries = run(reader.get(key), 10.0)
                end = time.perf_counter()
                if i >= WARM_UP:
                    put_s.append(middle - begun)
                    get_s.append(end - middle)
                    calls += sum(t.stats.calls_made for _, t in peers) - before
                    ok += [e.body for e in entries] == [value]
            if bulk:
                many = measure_bulk(peers, bulk)
    finally:
        run(stop_peers(peers), 30.0)
    return {
        "peers": count,
        "ops": ops,
        "ok": ok,
        "put_ms": round(statistics.median(put_s) * 1e3, 3),
        "get_ms": round(statistics.median(get_s) * 1e3, 3),
        "calls_per_put_and_get": round(calls / ops, 2),
    } | many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--ops", type=int, default=200)
    parser.add_argument("--bulk", type=int, default=0, metavar="KEYS", help="put and get so many keys at once, too")
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter that has hivemind, to measure it too")
    options = parser.parse_args()
    if options.peers < 2 or options.ops < 1:
        parser.error("at least 2 peers and 1 operation")
    result = measure(options.peers, options.ops, options.bulk)
    if options.hivemind:
        script = Path(__file__).parent / "anchors" / "hivemind_dht.py"
        command = [options.hivemind, str(script), str(options.peers), str(options.ops)]
        theirs = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()[-1]
        )
        result |= {f"hivemind_{name}": theirs[name] for name in ("put_ms", "get_ms")}
        result |= {f"{name}_ratio": round(result[f"{name}_ms"] / theirs[f"{name}_ms"], 3) for name in ("put", "get")}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:24} {value}")
    if result["ok"] != options.ops or result.get("bulk_found", 0) != options.bulk:
        sys.exit("some values were not read back")


if __name__ == "__main__":
    main()
