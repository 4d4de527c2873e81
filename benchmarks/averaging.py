"""All-reduce between peer processes on this machine, next to gloo and, if its Python is given, hivemind.

    python -m benchmarks.averaging --json --peers 4 --mb 100 [--rounds 7] [--hivemind /path/to/python]

One process per peer, torch on one thread, loopback, TLS; gloo is plaintext. All processes of all systems are started
first. Then the systems take turns, round by round, so that a busy moment of the machine meets all of them. A round's
time is that of its slowest peer, from the sealed group to the last chunk; figures are medians over rounds. `*_step_s`
counts group forming and copies as well, `*_cpu_s` is the processor time of all peers in a whole step, and
`*_cpu_s_per_gb` that of one peer for each 10^9 bytes of fp32 that it averages.

    python -m benchmarks.averaging --json --link-mbit 100 [--link-latency-ms 10] [--mb 10]

puts every peer behind a link of its own (`swarm.simulation.proxy`): all it sends and all it receives share 100 Mbit/s
each. `*_wire_s` is what the payload that the busiest peer sends takes at that rate; gloo and hivemind take no part.

    python -m benchmarks.averaging --json --device cuda

averages tensors on one CUDA device that all peers share: `*_copy_s` is what a step spends besides group forming and
exchange, which is copying to and from the device, and `background_pause_s` how long a background round keeps the
training thread, at its begin and its end together.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0
ROUND_TIMEOUT_S = 90.0
CODECS = {"fp32": "none", "bf16": "bf16", "int8": "int8", "int4": "int4"}


def run_peer(rank: int, count: int, numel: int, folder: Path, codecs: list[str], device: str, link: str) -> None:
    """One peer process: for each line on stdin, which names a codec, averages once and prints what it took."""
    from benchmarks.averaging_peer import started_peer, torch
    from swarm.averaging.allreduce import AllReduce
    from swarm.averaging.averager import Averager

    with started_peer(rank, folder, link) as peer:
        averagers = {}
        for name in [codec for codec in codecs if "/" not in codec]:
            values = (torch.full((numel,), float(rank)) + torch.randn(numel) * 0.01).to(device)
            strategy = AllReduce(min_group=count, max_group=count, codec=CODECS[name])
            averagers[name] = (Averager(peer, [values], name, strategy), values)
        print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
        for line in sys.stdin:
            name, _, background = line.strip().partition("/")
            averager, values = averagers[name]
            if values.is_cuda:
                torch.cuda.synchronize()
            started, cpu = time.perf_counter(), time.process_time()
            pause_s = 0.0
            if background:
                handle = averager.step(wait=False)
                pause_s = time.perf_counter() - started
                handle.result()
                applied = time.perf_counter()
                result = handle.apply()
                pause_s += time.perf_counter() - applied
            else:
                result = averager.step()
            if values.is_cuda:
                torch.cuda.synchronize()
            report = {
                "step_s": time.perf_counter() - started,
                "copy_s": time.perf_counter() - started - result.seconds,
                "pause_s": pause_s,
                "cpu_s": time.process_time() - cpu,
                "exchange_s": result.exchange_s,
                "sent": result.bytes_sent,
                "ok": result.averaged and not result.degraded,
            }
            if not background:
                report["digest"] = zlib.crc32(values.cpu().numpy().data)
            print(json.dumps(report), flush=True)
            values.add_(0.01 * (rank - (count - 1) / 2))  # members differ again before the next round
        for averager, _ in averagers.values():
            averager.close()


@dataclass
class System:
    """The processes of one system, one per peer, and the rounds that they have run."""

    processes: list[subprocess.Popen[str]]
    rounds: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)

    @classmethod
    def start(
        cls, command: list[str], peers: int, numel: int, folder: Path, codecs: list[str], links: Sequence[str] = ()
    ) -> System:
        """Start all its processes, without waiting for them. `links`: of each peer, if it is behind one."""
        pipe = subprocess.PIPE
        arguments = [str(peers), str(numel), str(folder), ",".join(codecs)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *arguments, *links[rank : rank + 1]], stdin=pipe, stdout=pipe, text=True
            )
            for rank in range(peers)
        ]
        return cls(processes, {name: [] for name in codecs})

    def answers(self, timeout_s: float) -> list[dict[str, Any]]:
        """The next answer of every process."""
        found = []
        end = time.monotonic() + timeout_s
        for process in self.processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if not line:
                raise SystemExit(f"A process did not answer: {process.args!r}")
            found.append(json.loads(line))
        return found

    def round(self, name: str, *, counts: bool) -> None:
        """One round of all its peers."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(name + "\n")
            process.stdin.flush()
        answers = self.answers(ROUND_TIMEOUT_S)
        if not all(answer["ok"] for answer in answers):
            raise SystemExit(f"A round of {name} was not complete: {answers}")
        if len({answer.get("digest") for answer in answers}) != 1:
            raise SystemExit(f"The peers hold different bits after a round of {name}.")
        if counts:
            self.rounds[name].append(answers)

    def run(self, rounds: int) -> None:
        """Wait until all its processes are ready, run so many rounds of each kind and one before, and end them."""
        done = False
        try:
            self.answers(START_TIMEOUT_S)
            for index in range(rounds + 1):
                for name in self.rounds:
                    self.round(name, counts=index > 0)
            done = True
        finally:
            self.end(kill=not done)

    def median(self, name: str, key: str, total: bool = False) -> float:
        """Median over rounds of the slowest peer's figure, or of the sum over peers."""
        combine = sum if total else max
        return float(statistics.median(combine([a[key] for a in answers]) for answers in self.rounds[name]))

    def end(self, kill: bool) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(0.0 if kill else 20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def ours_on(device: str) -> list[str]:
    """The command of one of our peers."""
    return [sys.executable, "-m", "benchmarks.averaging", "--peer", device]


def measure(peers: int, numel: int, rounds: int, hivemind: str | None) -> dict[str, float]:
    """Run the systems in turns and return the figures."""
    anchors = Path(__file__).parent / "anchors"
    with tempfile.TemporaryDirectory() as name:
        shape = (peers, numel, Path(name))
        systems: dict[str, System] = {}
        done = False
        try:
            systems["ours"] = System.start(ours_on("cpu"), *shape, list(CODECS))
            systems["gloo"] = System.start([sys.executable, str(anchors / "gloo_allreduce.py")], *shape, ["gloo"])
            if hivemind:
                command = [hivemind, str(anchors / "hivemind_averaging.py")]
                systems["hivemind"] = System.start(command, *shape, ["fp32", "fp16"])
            for system in systems.values():
                system.answers(START_TIMEOUT_S)
            for index in range(rounds + 1):
                for system in systems.values():
                    for codec in system.rounds:
                        system.round(codec, counts=index > 0)  # the first round also connects
            done = True
        finally:
            for system in systems.values():
                system.end(kill=not done)
    ours_, gloo = systems["ours"], systems["gloo"]
    figures: dict[str, float] = {}
    for codec in CODECS:
        figures[f"{codec}_s"] = ours_.median(codec, "exchange_s")
    figures["gloo_s"] = gloo.median("gloo", "exchange_s")
    for codec in CODECS:
        figures[f"{codec}_to_gloo"] = figures[f"{codec}_s"] / figures["gloo_s"]
    if hivemind:
        for codec, theirs in (("fp32", "fp32"), ("bf16", "fp16")):
            figures[f"hivemind_{theirs}_s"] = systems["hivemind"].median(theirs, "exchange_s")
            figures[f"{codec}_faster_than_hivemind_{theirs}"] = figures[f"hivemind_{theirs}_s"] / figures[f"{codec}_s"]
    for codec in CODECS:
        figures[f"{codec}_step_s"] = ours_.median(codec, "step_s")
        figures[f"{codec}_cpu_s"] = ours_.median(codec, "cpu_s", total=True)
        figures[f"{codec}_cpu_s_per_gb"] = figures[f"{codec}_cpu_s"] / (peers * numel * 4e-9)
    figures["gloo_cpu_s"] = gloo.median("gloo", "cpu_s", total=True)
    return figures


def measure_links(peers: int, numel: int, rounds: int, mbit: float, latency_ms: float) -> dict[str, float]:
    """Our figures with every peer behind a link of its own."""
    from swarm.simulation.proxy import ProxyProcess, free_port

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ProxyProcess() as proxy:
        links = []
        for rank in range(peers):
            port = free_port()
            shape = {
                "up_mbit": mbit,
                "down_mbit": mbit,
                "latency_ms": latency_ms / 2,
            }  # two links lie between two peers
            links.append(f"{port}/{proxy.add(str(rank), f'127.0.0.1:{port}', **shape)}")
        system = System.start(ours_on("cpu"), peers, numel, Path(folder), list(CODECS), links)
        for rank, process in enumerate(system.processes):
            proxy.own(str(rank), process.pid)
        system.run(rounds)
    for codec in CODECS:
        figures[f"{codec}_s"] = system.median(codec, "exchange_s")
    for codec in CODECS:
        wire_s = system.median(codec, "sent") * 8e-6 / mbit
        figures[f"{codec}_wire_s"] = wire_s
        figures[f"{codec}_of_line_rate"] = wire_s / figures[f"{codec}_s"]
        figures[f"{codec}_step_s"] = system.median(codec, "step_s")
    return figures


def measure_device(peers: int, numel: int, rounds: int, device: str) -> dict[str, float]:
    """Our figures for tensors on a device that all peers share."""
    figures: dict[str, float] = {}
    names = [name + suffix for name in CODECS for suffix in ("", "/background")]
    with tempfile.TemporaryDirectory() as folder:
        system = System.start(ours_on(device), peers, numel, Path(folder), names)
        system.run(rounds)
    for codec in CODECS:
        figures[f"{codec}_s"] = system.median(codec, "exchange_s")
        for key in ("step_s", "copy_s"):
            figures[f"{codec}_{key}"] = system.median(codec, key)
        figures[f"{codec}_background_pause_s"] = system.median(f"{codec}/background", "pause_s")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line only")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mb", type=float, help="megabytes (1e6) of fp32 per peer: 100, behind links 10")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of an environment with hivemind")
    parser.add_argument("--link-mbit", type=float, help="put every peer behind a link of so many Mbit/s up and down")
    parser.add_argument("--link-latency-ms", type=float, default=10.0, help="one way, from peer to peer")
    parser.add_argument("--device", default="cpu", help="where our peers' tensors are: cpu, or cuda")
    options = parser.parse_args()
    mb = options.mb or (10.0 if options.link_mbit else 100.0)
    numel = int(mb * 1e6 / 4)
    shape = {"peers": options.peers, "mb": mb, "rounds": options.rounds}
    if options.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("There is no CUDA device here.")
        shape |= {"device": torch.cuda.get_device_name(options.device)}
        figures = measure_device(options.peers, numel, options.rounds, options.device)
    elif options.link_mbit:
        shape |= {"link_mbit": options.link_mbit, "link_latency_ms": options.link_latency_ms}
        figures = measure_links(options.peers, numel, options.rounds, options.link_mbit, options.link_latency_ms)
    else:
        figures = measure(options.peers, numel, options.rounds, options.hivemind)
    if options.json:
        print(json.dumps({**shape, **{key: round(value, 4) for key, value in figures.items()}}))
        return
    for key, value in {**shape, **figures}.items():
        print(f"{key:34} {value:.4f}" if isinstance(value, float) else f"{key:34} {value}")


if __name__ == "__main__":
    if "--peer" in sys.argv[1:2]:
        _, _, on, own_rank, size, elements, where, wanted, *behind = sys.argv
        run_peer(int(own_rank), int(size), int(elements), Path(where), wanted.split(","), on, "".join(behind))
    else:
        main()
