"""Anchor: one peer of hivemind's group averaging, all peers in one group. Needs hivemind.

Usage: python hivemind_averaging.py RANK PEERS NUMEL FOLDER fp32,fp16

Runs one round for each line on stdin, which names a codec, and answers it with a JSON line; ends with stdin.
`benchmarks.averaging` drives it. hivemind's averager forks, so that each peer is a process of its own and a folder is
the barrier: the time of a round begins when all peers have found their group.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression

CODECS = {"fp32": NoCompression, "fp16": Float16Compression}


def barrier(folder: str, name: str, rank: int, count: int) -> None:
    with open(f"{folder}/{name}.{rank}", "w"):
        pass
    while sum(entry.startswith(name + ".") for entry in os.listdir(folder)) < count:
        time.sleep(0.002)


def start_dht(folder: str, rank: int) -> DHT:
    """The first peer is everybody's bootstrap peer."""
    path = f"{folder}/hivemind-address"
    if rank == 0:
        dht = DHT(start=True)
        with open(path + ".part", "w") as out:
            out.write("\n".join(map(str, dht.get_visible_maddrs())))
        os.rename(path + ".part", path)
        return dht
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        return DHT(initial_peers=file.read().split(), start=True)


def main(rank: int, count: int, numel: int, folder: str, codecs: list[str]) -> None:
    torch.set_num_threads(1)
    dht = start_dht(folder, rank)
    averagers = {}
    for name in codecs:
        averagers[name] = DecentralizedAverager(
            [torch.full((numel,), float(rank)) + torch.randn(numel) * 0.01],
            dht,
            prefix=f"bench-{name}",
            compression=CODECS[name](),
            target_group_size=count,
            min_group_size=count,
            min_matchmaking_time=1.0,
            request_timeout=1.0,
            start=True,
        )
    print(json.dumps({"ready": True}), flush=True)
    for index, line in enumerate(sys.stdin):
        control = averagers[line.strip()].step(timeout=60, wait=False, require_trigger=True)
        while control.stage.name in ("IDLE", "LOOKING_FOR_GROUP") and not control.done():
            time.sleep(0.002)
        barrier(folder, f"hivemind{index}", rank, count)
        started = time.perf_counter()
        control.allow_allreduce()
        try:
            ok = control.result(60) is not None
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises makes the round count as failed
            print("failed", rank, repr(error), file=sys.stderr)
            ok = False
        print(json.dumps({"exchange_s": time.perf_counter() - started, "ok": ok}), flush=True)
    for averager in averagers.values():
        averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5].split(","))
