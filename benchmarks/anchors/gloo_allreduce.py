"""Anchor: one process of torch.distributed's gloo all-reduce over loopback, plaintext.

Usage: python gloo_allreduce.py RANK PROCESSES NUMEL FOLDER fp32

Runs one round for each line on stdin and answers it with a JSON line; ends with stdin. `benchmarks.averaging` drives
it.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist


def main(rank: int, count: int, numel: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=count)
    values = torch.randn(numel)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        dist.all_reduce(values)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        values /= count
        print(json.dumps({"exchange_s": seconds, "cpu_s": cpu, "ok": True}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
