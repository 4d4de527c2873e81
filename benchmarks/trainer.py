"""What averaging in the background costs a trainer: steps a second with it and without.

    python -m benchmarks.trainer --json [--every 50] [--hidden 1024] [--repeats 5] [--codec none]

Two trainers with a plain torch loop under `swarm.attach(ParameterAveraging(every=H))` take turns with two that run the
same loop and never import swarm, block by block of a few rounds. Two settings: `busy`, where each trainer is pinned to
a core of its own, so that whatever averaging computes comes out of training; and `free`, where one trainer has two
cores for its one compute thread, and the other only keeps up with it without computing. The ratio is the median over
pairs of blocks that ran after one another; `*_cpu_ratio` is that of processor times, which scatter less, and says what
is left of a core that has nothing to spare. `*_cpu_s_per_gb` is the processor time that averaging adds to a trainer,
for each 10^9 bytes of parameters that it averages, snapshots for joiners and group forming included.

Both sides let the allocator keep freed memory, as swarm does by itself (`swarm.tensors.memory`): a plain loop, which
gets its gradients as fresh pages in each step, would be slower than one with swarm. `--untuned` shows that.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.averaging import START_TIMEOUT_S, System

ROUNDS_PER_BLOCK = 2
PEERS = 2


class Pace:
    """Tells a trainer that computes nothing when the first one has made a step."""

    def __init__(self, file: Path, rank: int) -> None:
        self._file = file
        self._leads = rank == 0
        self._steps = 0
        if self._leads:
            file.write_bytes(bytes(8))

    @cached_property
    def _counter(self) -> mmap.mmap:
        with self._file.open("r+b") as stream:
            return mmap.mmap(stream.fileno(), 8)

    def step(self) -> None:
        if self._leads:
            self._steps += 1
            self._counter[:] = self._steps.to_bytes(8, "little")

    def follow(self) -> None:
        self._steps += 1
        while int.from_bytes(self._counter[:], "little") < self._steps:
            time.sleep(0.001)


def run_trainer(rank: int, folder: Path, shape: dict[str, Any]) -> None:
    """One trainer process: trains a block of steps for each line on stdin."""
    if shape["busy"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    from torch import nn

    torch.set_num_threads(1)
    if not shape["untuned"]:
        torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)  # what swarm does, without importing it
    torch.manual_seed(0)
    hidden, every = shape["hidden"], shape["every"]
    model = nn.Sequential(
        nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(rank)
    data, labels = torch.randn(shape["batch"], hidden), torch.randint(0, 10, (shape["batch"],))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()

    for _ in range(10):
        step()
    pace = Pace(folder / f"pace-{shape['swarm']}", rank)
    with ExitStack() as stack:
        attached = None
        if shape["swarm"]:
            from benchmarks.averaging_peer import started_peer
            from swarm.averaging.allreduce import AllReduce
            from swarm.training.attach import attach
            from swarm.training.averaging import ParameterAveraging

            peer = stack.enter_context(started_peer(rank, folder))
            averaging = ParameterAveraging(every, AllReduce(max_group=PEERS, codec=shape["codec"]))
            attached = stack.enter_context(attach(model, optimizer, peer, averaging))
        parameters = sum(p.numel() for p in model.parameters())
        print(json.dumps({"ready": True, "parameters": parameters}), flush=True)
        for _ in sys.stdin:
            rounds = attached.stats.outcomes["Group"] if attached else 0
            pause_s = attached.stats.pause_s if attached else 0.0
            begun, cpu = time.perf_counter(), time.process_time()
            done = ROUNDS_PER_BLOCK * every
            for _ in range(done):
                if shape["busy"] or rank == 0:
                    step()
                    pace.step()
                else:
                    pace.follow()
                    optimizer.step()
            seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
            answer = {
                "ok": True,
                "seconds": seconds,
                "steps_s": done / seconds,
                "cpu_s": cpu,
                "rounds": 0,
                "pause_s": 0.0,
            }
            if attached is not None:
                answer["rounds"] = attached.stats.outcomes["Group"] - rounds
                answer["pause_s"] = attached.stats.pause_s - pause_s
            print(json.dumps(answer), flush=True)


def measure(repeats: int, shape: dict[str, Any]) -> dict[str, float]:
    """One setting's figures."""
    command = [sys.executable, "-m", "benchmarks.trainer", "--trainer"]
    systems: dict[str, System] = {}
    done = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in ("plain", "swarm"):
                argument = json.dumps({**shape, "swarm": name == "swarm"})
                systems[name] = System.start([*command, argument], PEERS, 0, Path(folder), ["block"])
            ready = {name: system.answers(START_TIMEOUT_S) for name, system in systems.items()}
            for index in range(repeats + 1):
                for system in systems.values():
                    system.round("block", counts=index > 0)
            done = True
        finally:
            for system in systems.values():
                system.end(kill=not done)
    counted = range(PEERS) if shape["busy"] else range(1)

    def figure(name: str, key: str) -> list[float]:
        """Of each block, the mean over the trainers that count."""
        return [statistics.mean(answers[i][key] for i in counted) for answers in systems[name].rounds["block"]]

    parameters = ready["swarm"][0]["parameters"]
    with_, without = figure("swarm", "steps_s"), figure("plain", "steps_s")
    ratios = [a / b for a, b in zip(with_, without, strict=True)]
    rounds = figure("swarm", "rounds")
    added_cpu_s = [a - b for a, b in zip(figure("swarm", "cpu_s"), figure("plain", "cpu_s"), strict=True)]
    return {
        "state_mb": parameters * 4e-6,
        "steps_s": statistics.median(with_),
        "plain_steps_s": statistics.median(without),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "rounds_per_block": statistics.mean(rounds),
        "pause_ms_per_round": 1e3 * sum(figure("swarm", "pause_s")) / max(1.0, sum(rounds)),
        "added_cpu_ms_per_round": 1e3 * sum(added_cpu_s) / max(1.0, sum(rounds)),
        "cpu_ratio": statistics.median(
            b / a for a, b in zip(figure("swarm", "cpu_s"), figure("plain", "cpu_s"), strict=True)
        ),
        "cpu_s_per_gb": statistics.mean(added_cpu_s) / max(1.0, statistics.mean(rounds)) / (parameters * 4e-9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line only")
    parser.add_argument("--every", type=int, default=50, help="H: steps between two rounds")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--settings", default="busy,free")
    parser.add_argument("--untuned", action="store_true", help="leave the allocator of the plain side as it is")
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("every", "hidden", "batch", "codec", "untuned")}
    figures: dict[str, Any] = {"trainers": PEERS, "threads": 1, **shape}
    for setting in options.settings.split(","):
        found = measure(options.repeats, {**shape, "busy": setting == "busy"})
        figures["state_mb"] = found.pop("state_mb")
        figures |= {f"{setting}_{key}": value for key, value in found.items()}
    if options.json:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))
        return
    for key, value in figures.items():
        print(f"{key:30} {value:.4f}" if isinstance(value, float) else f"{key:30} {value}")


if __name__ == "__main__":
    if "--trainer" in sys.argv[1:2]:
        run_trainer(int(sys.argv[3]), Path(sys.argv[6]), json.loads(sys.argv[2]))
    else:
        main()
