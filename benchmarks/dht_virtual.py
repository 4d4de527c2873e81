"""The DHT in large networks and under attack, in virtual time: success, depth, messages, seconds, memory.

    python -m benchmarks.dht_virtual --json --scenario lossy --peers 1000 --seed 0
    python -m benchmarks.dht_virtual --json --scenario scale

Scenarios: `lossy` (5 % of all calls time out), `scale` (no losses; without `--peers` several sizes, each in a process
of its own, with the growth of the costs), `churn` (a median lifetime of ten minutes until half the peers are replaced),
`clocks` (`lossy` twice, with wall clocks that agree and that are ten minutes apart), `malicious` (a part of the peers
lies in every way it can), `split` (cut in half for ten minutes), `flood` (one member floods another) and `eclipse`
(many of one subnet settle around a peer).
Prints one JSON line; delays are 20 to 200 ms one way, ids uniform, everything random is seeded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.simulation.dht_attacks import malicious
from swarm.simulation.dht_floods import eclipse, flood
from swarm.simulation.dht_scenarios import churn, growth, lossy, scale
from swarm.simulation.dht_splits import split
from swarm.simulation.virtual import run_virtual

SIZES = (250, 1000, 5000)
CLOCKS_APART_S = 600.0


def measure(scenario: Callable[[], Coroutine[Any, Any, Any]], seed: int) -> dict[str, Any]:
    """Figures of one scenario, flat, with real time and memory."""
    begun, cpu = time.monotonic(), time.process_time()
    figures = dataclasses.asdict(run_virtual(scenario, seed, real_timeout_s=None))
    figures |= figures.pop("did", {})
    figures["real_s"] = time.monotonic() - begun
    figures["cpu_s"] = time.process_time() - cpu
    figures["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def scale_of_sizes(seed: int) -> dict[str, Any]:
    """`scale` at several sizes, and how the costs grow."""
    command = [sys.executable, "-m", "benchmarks.dht_virtual", "--json", "--scenario", "scale", "--seed", str(seed)]
    sizes: dict[int, dict[str, Any]] = {}
    for peers in SIZES:
        done = subprocess.run([*command, "--peers", str(peers)], capture_output=True, text=True, check=True)
        sizes[peers] = json.loads(done.stdout.splitlines()[-1])
        print(f"{peers} peers: {sizes[peers]['real_s']:.0f} s, {sizes[peers]['peak_rss_mb']:.0f} MB", file=sys.stderr)
    result: dict[str, Any] = {"sizes": list(sizes.values())}
    for cost in ("messages_per_put", "messages_per_get", "mean_depth"):
        fit = growth({peers: figures[cost] for peers, figures in sizes.items()})
        result[f"growth_of_{cost}"] = {name: round(value, 4) for name, value in dataclasses.asdict(fit).items()}
    return result


def clocks(peers: int, seed: int) -> dict[str, Any]:
    """`lossy` with clocks that agree and with clocks that do not."""
    agree, apart = (
        measure(lambda skew_s=skew_s: lossy(peers, seed=seed, clock_skew_s=skew_s), seed)
        for skew_s in (0.0, CLOCKS_APART_S)
    )
    timing = ("real_s", "join_real_s", "cpu_s", "peak_rss_mb", "clock_skew_s")
    same = {k: v for k, v in agree.items() if k not in timing} == {k: v for k, v in apart.items() if k not in timing}
    return {"same": same, "agree": agree, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument(
        "--scenario",
        choices=["lossy", "scale", "churn", "clocks", "malicious", "split", "flood", "eclipse"],
        default="lossy",
    )
    parser.add_argument("--peers", type=int, help="1000 by default, 250 for attacks, 100 for flood and eclipse")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0.0, metavar="SECONDS", help="wall clocks are so far apart")
    parser.add_argument("--fraction", type=float, default=0.2, help="of malicious peers")
    options = parser.parse_args()
    seed, skew_s = options.seed, options.skew
    usual = {"malicious": 250, "split": 250, "flood": 100, "eclipse": 100}
    peers = options.peers or usual.get(options.scenario, 1000)
    result: dict[str, Any]
    match options.scenario:
        case "scale" if options.peers is None:
            result = scale_of_sizes(seed)
        case "scale":
            result = measure(lambda: scale(peers, seed=seed), seed)
        case "lossy":
            result = measure(lambda: lossy(peers, seed=seed, clock_skew_s=skew_s), seed)
        case "churn":
            result = measure(lambda: churn(peers, seed=seed, clock_skew_s=skew_s), seed)
        case "clocks":
            result = clocks(peers, seed)
        case "malicious":
            result = measure(lambda: malicious(peers, options.fraction, seed=seed, clock_skew_s=skew_s), seed)
        case "split":
            result = measure(lambda: split(peers, seed=seed, clock_skew_s=skew_s), seed)
        case "flood":
            result = measure(lambda: flood(peers, seed=seed), seed)
        case "eclipse":
            result = measure(lambda: eclipse(peers, spoof=True, seed=seed), seed)
    result = {"scenario": options.scenario} | result
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
