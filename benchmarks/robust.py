"""What robust reducers cost: milliseconds for one MiB of averaged fp32, on one core.

python -m benchmarks.robust [--json] [--members 4 16]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from swarm.averaging.robust import CenteredClip, Median, RobustReducer, TrimmedMean

ELEMENTS = 1024 * 1024 // 4
REPEATS = 7
REDUCERS: dict[str, RobustReducer] = {
    "median": Median(),
    "trimmed_mean": TrimmedMean(),
    "centered_clip": CenteredClip(),
}


def measure(members: int) -> dict[str, float]:
    """Milliseconds per MiB by reducer; `weighted` with members of different weights."""
    rows, out = torch.randn(members, ELEMENTS), torch.empty(ELEMENTS)
    figures = {"mean": _fastest(lambda values: _mean(values, out), rows)}
    for kind, weights in (("", [1.0] * members), ("_weighted", [1.0 + 0.1 * (i % 3) for i in range(members)])):
        for name, reducer in REDUCERS.items():
            figures[name + kind] = _fastest(lambda values, r=reducer, w=weights: r.combine(values, w, out), rows)
    return figures


def _mean(values: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()
    for row in values:
        out.add_(row, alpha=1 / len(values))


def _fastest(work, rows: torch.Tensor) -> float:  # type: ignore[no-untyped-def]
    best = float("inf")
    for _ in range(REPEATS):
        values = rows.clone()
        begun = time.perf_counter()
        work(values)
        best = min(best, time.perf_counter() - begun)
    return round(1000 * best, 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {str(count): measure(count) for count in options.members}
    if options.json:
        print(json.dumps(results))
    else:
        for count, figures in results.items():
            print(f"{count} members: " + ", ".join(f"{name} {ms} ms" for name, ms in figures.items()))
