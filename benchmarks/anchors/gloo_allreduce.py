"""Anchor: torch.distributed's gloo all-reduce over loopback, plaintext. Prints one JSON line.

Usage: python gloo_allreduce.py PROCESSES NUMEL ROUNDS
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank: int, count: int, numel: int, rounds: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    values = torch.randn(numel)
    dist.all_reduce(values)
    times = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        dist.barrier()
        times.append(time.perf_counter() - started)
    if rank == 0:
        seconds = sorted(times)[rounds // 2]
        print(json.dumps({"system": "gloo", "peers": count, "mb": numel * 4 / 1e6, "allreduce_s": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    processes, size, repeats = map(int, sys.argv[1:4])
    mp.spawn(worker, args=(processes, size, repeats, free_port), nprocs=processes)
