"""The workload of `benchmarks.dht` on hivemind 1.1.12: run with an interpreter that has it, not with swarm's.

    python hivemind_dht.py PEERS OPS

Sequentially: one random peer stores a value under a new key, another reads it. Prints one JSON line, milliseconds.
"""

import json
import random
import statistics
import sys
import time
import uuid


def main(count: int, ops: int) -> None:
    from hivemind import DHT
    from hivemind.utils import get_dht_time

    random.seed(0)
    peers: list = []
    for _ in range(count):
        near = [a for p in random.sample(peers, min(4, len(peers))) for a in p.get_visible_maddrs()]
        peers.append(DHT(initial_peers=near, start=True))
    put, get, ok = [], [], 0
    for _ in range(ops):
        key, value = uuid.uuid4().hex, uuid.uuid4().hex
        writer, reader = random.sample(peers, 2)
        begun = time.perf_counter()
        writer.store(key, value, get_dht_time() + 300, subkey="s")
        put.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        found = reader.get(key, latest=True)
        get.append(time.perf_counter() - begun)
        ok += found is not None and found.value["s"].value == value
    result = {
        "ok": ok,
        "put_ms": round(statistics.median(put) * 1e3, 3),
        "get_ms": round(statistics.median(get) * 1e3, 3),
    }
    print(json.dumps(result), flush=True)
    for peer in peers:
        peer.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
