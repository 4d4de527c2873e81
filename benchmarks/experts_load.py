"""One host under 1, 2, 4 and 8 trainers that call its experts at once: throughput, and how busy the host is with it.

Part of `python -m benchmarks.experts`. Every trainer is a process of its own that runs forward and backward passes in a
loop; all trainers are started first, and take part in turn.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

HID, BATCH = 1024, 256
TRAINERS = (1, 2, 4, 8)
SETTLE_S, WINDOW_S = 1.0, 4.0
START_TIMEOUT_S = 180.0


def call_in_turn(peer: Any, directory: str) -> None:
    """The loop of a trainer: while the file `active` holds a number above its own, call; then write what it did."""
    import torch

    import swarm
    from swarm.simulation.status import append_json

    torch.set_num_threads(1)
    folder, index = Path(directory), int(peer.name.rsplit("-", 1)[1])
    peer.wait_for_experts("ffn", timeout_s=START_TIMEOUT_S)
    expert, x = swarm.RemoteExpert(peer, "ffn"), torch.randn(BATCH, HID, requires_grad=True)
    expert(x).sum().backward()
    (folder / f"{peer.name}.ready").touch()
    calls, begun = 0, 0.0
    while (active := (folder / "active").read_text()) != "end":
        if index < int(active):
            begun = begun or time.perf_counter()
            expert(x).sum().backward()
            calls += 1
            continue
        if calls:
            append_json(folder / f"{peer.name}.jsonl", {"calls": calls, "seconds": time.perf_counter() - begun})
            calls, begun = 0, 0.0
        time.sleep(0.01)
    stats = expert.stats
    append_json(folder / "stats.jsonl", {"failed": stats.failed_calls, "lost": stats.lost_updates})


def measure(config: dict[str, Any], local_s: float) -> list[dict[str, Any]]:
    """One line per number of trainers.

    Args:
        config: Of all peers.
        local_s: What the same pass takes in this process, on one thread: `host_utilisation` is the share of the time
            that the host would have spent on nothing but such passes; `host_cpu` is what its process took, in cores.
    """
    import psutil

    import swarm
    from swarm.simulation.status import read_json_lines

    optimizer = swarm.OptimizerSpec("sgd", lr=1e-6)
    grid = swarm.ExpertGrid("ffn", "ffn", config={"hid": HID}, replicas=1, optimizer=optimizer)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        active = folder / "active"
        active.write_text("0")

        def switch(text: str) -> None:
            part = folder / "active.part"
            part.write_text(text)
            part.replace(active)

        with swarm.LocalSwarm(
            experts=[grid],
            hosts=1,
            trainers=max(TRAINERS),
            train="benchmarks.experts_load:call_in_turn",
            train_args={"directory": name},
            torch_threads=1,
            config=config,
        ) as s:
            _wait(folder, "*.ready", max(TRAINERS))
            host = psutil.Process(s.pid("host-0"))
            for count in TRAINERS:
                switch(str(count))
                time.sleep(SETTLE_S)
                cpu, begun = sum(host.cpu_times()[:2]), time.perf_counter()
                time.sleep(WINDOW_S)
                host_cpu = (sum(host.cpu_times()[:2]) - cpu) / (time.perf_counter() - begun)
                switch("0")
                written = _wait(folder, "trainer-*.jsonl", count)
                passes_s = sum(line["calls"] / line["seconds"] for file in written for line in read_json_lines(file)[0])
                for file in written:
                    file.unlink()
                lines.append(
                    {
                        "trainers": count,
                        "passes_s": round(passes_s, 2),
                        "tokens_s": round(passes_s * BATCH),
                        "host_utilisation": round(passes_s * local_s, 3),
                        "host_cpu": round(host_cpu, 3),
                    }
                )
            switch("end")
            for trainer in s.names("trainer"):
                s.wait(trainer, timeout_s=30.0)
        ended = read_json_lines(folder / "stats.jsonl")[0]
    failed = sum(line["failed"] + line["lost"] for line in ended)
    return [{**line, "failed_or_lost": failed} for line in lines]


def _wait(folder: Path, pattern: str, count: int) -> list[Path]:
    """The files of this pattern, once there are so many."""
    end = time.monotonic() + START_TIMEOUT_S
    while len(found := sorted(folder.glob(pattern))) < count:
        if time.monotonic() > end:
            raise SystemExit(f"Only {len(found)} of {count} trainers answered.")
        time.sleep(0.02)
    time.sleep(0.05)  # a line is being written
    return found
