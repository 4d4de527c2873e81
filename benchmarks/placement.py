"""Placement of experts under churn, in virtual time: losses against what deaths and repair times predict; moves, flaps.

    python -m benchmarks.placement --json --hosts 500 --experts 2000 --replicas 3 --churn 0.01 --graceful 0.8

Prints one JSON line with the figures of `swarm.simulation.expert_placement.PlacementFigures`, and whether the bars are
reached: losses of last replicas at most 1.5 times those predicted, each restored from a checkpoint, no flaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from swarm.simulation.expert_placement import PlacementModel, PlacementSimulation

MOST_LOSSES = 1.5


def measure(model: PlacementModel, seed: int) -> dict[str, Any]:
    """Figures of one simulation, flat, with what it cost."""
    begun = time.process_time()
    figures = PlacementSimulation(model, seed).run()
    result = dataclasses.asdict(figures)
    result |= {f"model_{name}": value for name, value in result.pop("model").items()}
    result["bars"] = {
        "losses": figures.losses <= MOST_LOSSES * figures.predicted_losses,
        "restored": figures.restored == figures.losses,
        "flaps": figures.flaps == 0,
    }
    result["cpu_s"] = time.process_time() - begun
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = PlacementModel()
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--hosts", type=int, default=usual.hosts)
    parser.add_argument("--experts", type=int, default=usual.experts)
    parser.add_argument("--replicas", type=int, default=usual.replicas)
    parser.add_argument("--minutes", type=float, default=usual.minutes)
    parser.add_argument("--churn", type=float, default=usual.churn, help="part of the hosts that go within a minute")
    parser.add_argument("--graceful", type=float, default=usual.graceful, help="part of those that hand over")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = PlacementModel(
        hosts=options.hosts,
        experts=options.experts,
        replicas=options.replicas,
        minutes=options.minutes,
        churn=options.churn,
        graceful=options.graceful,
    )
    result = measure(model, options.seed)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
