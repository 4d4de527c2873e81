"""What codecs cost: milliseconds per MiB of fp32 to encode, to decode and to decode into a sum, on one thread.

    python -m benchmarks.codecs [--json] [--device cuda] [--mib 1]

Each figure is the median over many repetitions of the time that the thread computed (wall time with `--device cuda`,
copies to and from the host included), on a chunk of `--mib` as an all-reduce handles it: warm, in memory that is used
again. `copy` is the same chunk copied by torch, for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from swarm.config import MIB
from swarm.tensors.codecs import CODECS, codec
from swarm.tensors.memory import keep_freed_memory

WARM_UP, LEAST_REPETITIONS, LEAST_S = 10, 30, 0.2


def measure(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median seconds of one call."""
    for _ in range(WARM_UP):
        work()
    seconds: list[float] = []
    spent = 0.0
    while len(seconds) < LEAST_REPETITIONS or spent < LEAST_S:
        begun = clock()
        work()
        seconds.append(clock() - begun)
        spent += seconds[-1]
    return statistics.median(seconds)


def run(device: str, mib: float) -> dict[str, object]:
    torch.set_num_threads(1)
    keep_freed_memory()
    on_cuda = device != "cpu"

    def synchronised() -> float:
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if on_cuda else time.thread_time()

    numel = int(mib * MIB) // 4
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    out, acc = torch.zeros_like(values), torch.zeros_like(values)

    def per_mib(work: Callable[[], object]) -> float:
        return round(measure(work, synchronised) * 1e3 / mib, 4)

    figures: dict[str, object] = {"device": device, "mib": mib, "copy": per_mib(lambda: out.copy_(values))}
    for name in [*CODECS, "topk:512"]:
        with_codec = codec(name)
        encoded = torch.frombuffer(bytearray(with_codec.encode(values)), dtype=torch.uint8)
        figures[name] = {
            "share": round(encoded.numel() / values.nbytes, 4),
            "encode": per_mib(lambda: with_codec.encode(values)),  # noqa: B023
            "encode_stochastic": per_mib(lambda: with_codec.encode(values, rng=1)),  # noqa: B023
            "decode": per_mib(lambda: with_codec.decode_into(encoded, out)),  # noqa: B023
            "decode_add": per_mib(lambda: with_codec.decode_add(encoded, torch.float32, acc, 0.5)),  # noqa: B023
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=float, default=1.0, help="size of the fp32 chunk")
    options = parser.parse_args()
    figures = run(options.device, options.mib)
    if options.json:
        print(json.dumps({"benchmark": "codecs", **figures}))
        return
    print(f"ms per MiB of fp32 on {options.device}; a copy takes {figures['copy']}")
    for name, row in figures.items():
        if isinstance(row, dict):
            print(f"{name:>9}", *(f"{key} {value:<8}" for key, value in row.items()))


if __name__ == "__main__":
    main()
