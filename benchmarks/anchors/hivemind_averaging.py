"""Anchor: hivemind's group averaging, one process per peer, one group. Needs hivemind; prints one JSON line.

Usage: python hivemind_averaging.py PEERS NUMEL ROUNDS none|fp16|u8

hivemind's averager forks, so each peer is this script again with a rank, and a folder is the barrier. The time of a
round begins when all peers have found their group and ends with its slowest peer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time


def barrier(folder: str, name: str, rank: int, count: int) -> None:
    with open(f"{folder}/{name}.{rank}", "w"):
        pass
    while sum(entry.startswith(name + ".") for entry in os.listdir(folder)) < count:
        time.sleep(0.002)


def peer(rank: int, count: int, numel: int, rounds: int, compression: str, folder: str, root: list[str]) -> None:
    import torch
    from hivemind import DHT, DecentralizedAverager
    from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

    torch.set_num_threads(1)
    codec = {"none": NoCompression, "fp16": Float16Compression, "u8": Uniform8BitQuantization}[compression]()
    dht = DHT(initial_peers=root, start=True)
    values = torch.full((numel,), float(rank)) + torch.randn(numel) * 0.01
    averager = DecentralizedAverager(
        [values],
        dht,
        prefix="bench",
        compression=codec,
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=1.0,
        request_timeout=1.0,
        start=True,
    )
    times, ok = [], 0
    for index in range(rounds):
        barrier(folder, f"a{index}", rank, count)
        control = averager.step(timeout=60, wait=False, require_trigger=True)
        while control.stage.name in ("IDLE", "LOOKING_FOR_GROUP") and not control.done():
            time.sleep(0.002)
        barrier(folder, f"b{index}", rank, count)
        started = time.perf_counter()
        control.allow_allreduce()
        try:
            ok += control.result(60) is not None
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises makes the round count as failed
            print("failed", rank, repr(error), file=sys.stderr)
        times.append(time.perf_counter() - started)
    with open(f"{folder}/out.{rank}", "w") as out:
        json.dump((ok, times), out)
    barrier(folder, "end", rank, count)
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    count, rounds, compression = int(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
    from hivemind import DHT

    root = DHT(start=True)
    folder = tempfile.mkdtemp()
    command = [sys.executable, __file__, *sys.argv[1:5]]
    addresses = list(map(str, root.get_visible_maddrs()))
    peers = [subprocess.Popen([*command, str(rank), folder, *addresses]) for rank in range(count)]
    for process in peers:
        process.wait(200)
    reports = []
    for rank in range(count):
        with open(f"{folder}/out.{rank}") as file:
            reports.append(json.load(file))
    seconds = sorted(max(times[i] for _, times in reports) for i in range(rounds))[rounds // 2]
    ok = sum(ok for ok, _ in reports)
    print(
        json.dumps(
            {"system": "hivemind", "compression": compression, "ok": ok, "of": count * rounds, "allreduce_s": seconds}
        ),
        flush=True,
    )
    root.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 5:
        peer(
            int(sys.argv[5]),
            int(sys.argv[1]),
            int(sys.argv[2]),
            int(sys.argv[3]),
            sys.argv[4],
            sys.argv[6],
            sys.argv[7:],
        )
    else:
        main()
