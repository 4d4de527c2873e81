"""How much memory a round takes, next to what the documentation of `Averager` says.

    python -m benchmarks.averaging_memory --json --peers 4 --mb 100

One process per peer, for each way to average anew. A peer holds its tensors and has exchanged a small vector before;
then the high-water mark of its resident memory is reset (Linux only) and read after each of three rounds. Figures are
the worst peer's peak above what was resident before, in units of the vector's bytes; `*_model` is the stated model:

    blocking    1 / members * r + W       the reducer's encoded averages, and a window for every other member:
                                          W = WINDOW_CHUNKS * (members - 1) * chunk / vector
    overlapped  the same + 2              the copy that is averaged, and the values from before
    feedback    the same + 1              what lossy codecs left out, in fp32

where r is the codec's share of fp32's bytes. What gRPC and the allocator hold on to comes on top of that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.averaging import START_TIMEOUT_S, System

MODES = {"fp32_blocking": ("none", True), "fp32_overlapped": ("none", False), "int8_blocking": ("int8", True)}
ROUNDS = 3


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit("This benchmark needs Linux.")


def run_peer(rank: int, count: int, numel: int, folder: Path, mode: str) -> None:
    """One peer process: a warm-up with a small vector, then for each line on stdin a round."""
    from benchmarks.averaging_peer import started_peer, torch
    from swarm.averaging.allreduce import AllReduce
    from swarm.averaging.averager import Averager

    codec, wait = MODES[mode]
    strategy = AllReduce(min_group=count, max_group=count, codec=codec)
    with started_peer(rank, folder) as peer:
        small = Averager(peer, [torch.randn(100_000)], "small", strategy)
        values = torch.randn(numel)
        print(json.dumps({"ready": True}), flush=True)
        baseline = 0
        averager: Averager | None = None
        for line in sys.stdin:
            if line.strip() == "small":
                ok, peak = small.step().averaged, 0
            else:
                if averager is None:
                    baseline = resident("VmRSS")
                    averager = Averager(peer, [values], mode, strategy)
                Path("/proc/self/clear_refs").write_text("5")
                result = averager.step() if wait else averager.step(wait=False).apply()
                ok, peak = result.averaged and not result.degraded, resident("VmHWM") - baseline
            print(json.dumps({"ok": ok, "peak": peak / (4 * numel)}), flush=True)


def model(mode: str, peers: int, numel: int) -> float:
    """What the documentation says, in units of the vector's bytes."""
    import torch

    from swarm.averaging.allreduce import WINDOW_CHUNKS
    from swarm.averaging.vector import FlatVector
    from swarm.config import PeerConfig
    from swarm.tensors.codecs import codec as find_codec
    from swarm.tensors.schema import TensorMeta

    name, wait = MODES[mode]
    codec = find_codec(name)
    vector = FlatVector([TensorMeta((numel,), torch.float32)], [codec])
    chunk = vector.chunks(0, numel // peers, PeerConfig.preset("local").averaging.chunk_bytes)[0]
    rate = codec.encoded_nbytes(numel, torch.float32) / (4 * numel)
    window = WINDOW_CHUNKS * (peers - 1) * codec.encoded_nbytes(chunk.numel, torch.float32) / (4 * numel)
    return rate / peers + window + (0 if wait else 2) + (0 if codec.exact(torch.float32) else 1)


def measure(peers: int, numel: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.averaging_memory", "--peer"]
            system = System.start(command, peers, numel, Path(folder), [mode, "small"])
            try:
                system.answers(START_TIMEOUT_S)
                time.sleep(0.2)  # let everybody's first records settle
                for _ in range(2):
                    system.round("small", counts=True)
                for _ in range(ROUNDS):
                    system.round(mode, counts=True)
            finally:
                system.end(kill=True)
            peaks = [max(answer["peak"] for answer in answers) for answers in system.rounds[mode]]
        figures[f"{mode}_first"], figures[f"{mode}_later"] = peaks[0], max(peaks[1:])
        figures[f"{mode}_model"] = model(mode, peers, numel)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line only")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=100.0, help="megabytes (1e6) of fp32 per peer")
    options = parser.parse_args()
    figures = measure(options.peers, int(options.mb * 1e6 / 4))
    if options.json:
        rounded = {key: round(value, 3) for key, value in figures.items()}
        print(json.dumps({"peers": options.peers, "mb": options.mb, **rounded}))
        return
    for mode in MODES:
        first, later, stated = (figures[f"{mode}_{what}"] for what in ("first", "later", "model"))
        print(f"{mode:18} first round {first:.2f}, later rounds {later:.2f}, model {stated:.2f} vectors")


if __name__ == "__main__":
    if "--peer" in sys.argv[1:2]:
        _, _, own_rank, size, elements, where, wanted = sys.argv
        run_peer(int(own_rank), int(size), int(elements), Path(where), wanted.split(",")[0])
    else:
        main()
