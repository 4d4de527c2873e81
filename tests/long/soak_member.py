"""What the processes of the soak test do: average again and again, and write down what each round left behind."""

import os
import time
from pathlib import Path
from typing import Any


def average_forever(peer: Any, directory: str, rounds: int, numel: int) -> None:
    """Run `rounds` rounds; one line about each in `<name>.jsonl`. `<name>.spoil` makes the next one's values NaN."""
    import psutil
    import torch

    from swarm.averaging.allreduce import AllReduce
    from swarm.averaging.averager import Averager
    from swarm.averaging.probation import Probation, ProbationPolicy
    from swarm.simulation.status import append_json

    folder, process = Path(directory), psutil.Process()
    log, spoil = folder / f"{peer.name}.jsonl", folder / f"{peer.name}.spoil"
    # The usual terms would keep a member that was made to fail out of most of the soak.
    peer.averaging.probation = Probation(ProbationPolicy(first_s=0.2, longest_s=0.5, half_life_s=2.0))
    values = torch.randn(numel)
    averager = Averager(peer, [values], "soak", AllReduce(min_group=2, max_group=4))
    handles = process.num_fds if os.name == "posix" else process.num_handles
    for number in range(rounds):
        if spoil.exists():
            spoil.unlink()
            values[:: numel // 7] = float("nan")
        begun = time.perf_counter()
        result = averager.step()
        line = {
            "round": number,
            "members": len(result.members),
            "degraded": list(result.degraded),
            "outcome": type(result.outcome).__name__,
            "seconds": time.perf_counter() - begun,
            "rss": process.memory_info().rss,
            "handles": handles(),
            "threads": process.num_threads(),
        }
        append_json(log, line)
        values.nan_to_num_(0.0).add_(torch.randn(numel), alpha=0.01)
    averager.close()
