"""Train on scikit-learn's handwritten digits with peers some of which lie about their weights.

    pip install 'swarm-train[examples]'
    python examples/train_digits.py           # 10 peers, 2 of which flip the sign of what they send
    python examples/train_digits.py --attack scale --reducer median --json

Three runs side by side: nobody lies; a fifth lies and the group takes the plain mean; a fifth lies and the group takes
a robust one. Peers share one process and its virtual time, so that the runs take seconds; what they run is the real
thing: identities, DHT, matchmaking and the exchange of averages. In a run of your own the only difference is
`swarm.AllReduce(reducer=swarm.CenteredClip())`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import swarm
from swarm.averaging.service import AveragingService
from swarm.endpoint import Endpoint
from swarm.simulation.poison import ATTACKS, Attack, poison
from swarm.simulation.virtual import run_virtual
from swarm.simulation.virtual_dht import VirtualDht

REDUCERS = {
    "mean": "mean",
    "centered_clip": swarm.CenteredClip(),
    "median": swarm.Median(),
    "trimmed_mean": swarm.TrimmedMean(),
}
STEPS = 10
"""Of every peer between two rounds of averaging."""
BATCH = 32


@dataclass(frozen=True)
class Digits:
    """The data: 8 x 8 pixels in 0..1 [images, 64], and which digit it is [images]."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    reducer: str
    liars: int
    accuracy: float
    """On the test images, of the worst honest peer."""
    rounds: int
    """Rounds in which all peers averaged together."""


class Member:
    """One peer: its model, its share of the images, its averager."""

    def __init__(self, endpoint: Endpoint, strategy: swarm.AllReduce, data: tuple[Tensor, Tensor], seed: int) -> None:
        self.averaging = AveragingService(endpoint)
        self.data = data
        self.random = torch.Generator().manual_seed(seed)
        torch.manual_seed(0)  # all start alike
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.averager = swarm.Averager(self, list(self.model.parameters()), "digits", strategy)

    def train(self) -> None:
        images, labels = self.data
        for _ in range(STEPS):
            batch = torch.randint(len(images), (BATCH,), generator=self.random)
            loss = F.cross_entropy(self.model(images[batch]), labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def accuracy(self, data: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            return float((self.model(data[0]).argmax(1) == data[1]).float().mean())


def load(seed: int) -> Digits:
    from sklearn.datasets import load_digits  # comes with its data: nothing is downloaded

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return Digits((images[train], labels[train]), (images[test], labels[test]))


async def train(
    digits: Digits, peers: int, liars: int, attack: Attack, reducer: str, rounds: int, seed: int
) -> Trained:
    """Train with `peers`, the last `liars` of which poison what they send."""
    strategy = swarm.AllReduce(min_group=peers, max_group=peers, reducer=REDUCERS[reducer])
    async with VirtualDht(peers, seed=seed, config=swarm.PeerConfig.preset("lan")) as network:
        images, labels = digits.train
        members = [
            Member(endpoint, strategy, (images[i::peers], labels[i::peers]), seed + i)
            for i, endpoint in enumerate(network.peers)
        ]
        honest, dishonest = members[: peers - liars], members[peers - liars :]
        together = 0
        for _ in range(rounds):
            for member in members:
                member.train()
            for member in dishonest:
                poison(list(member.model.parameters()), attack, member.random)
            ends = await asyncio.gather(*(m.averager.step_async(weight=STEPS * BATCH) for m in members))
            together += all(end.averaged and len(end.members) == peers for end in ends)
        for member in members:
            await member.averager.aclose()
        return Trained(reducer, liars, min(m.accuracy(digits.test) for m in honest), together)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--byzantine", type=float, default=0.2, help="the part of the peers that lie")
    parser.add_argument("--attack", choices=ATTACKS, default="sign_flip")
    parser.add_argument("--reducer", choices=list(REDUCERS), default="centered_clip", help="against the liars")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)

    begun, digits = time.monotonic(), load(options.seed)
    liars = round(options.byzantine * options.peers)
    runs = {
        "clean": (0, "mean"),
        "mean": (liars, "mean"),
        "robust": (liars, options.reducer),
    }
    ends = {}
    for name, (count, reducer) in runs.items():
        ends[name] = run_virtual(
            lambda count=count, reducer=reducer: train(
                digits, options.peers, count, options.attack, reducer, options.rounds, options.seed
            ),
            real_timeout_s=None,
        )
        if not options.json:
            end = ends[name]
            who = f"{count} of {options.peers} lie ({options.attack})" if count else "nobody lies"
            print(
                f"{who:32} {reducer:14} accuracy {end.accuracy:.3f}   {end.rounds} of {options.rounds} rounds",
                flush=True,
            )
    if options.json:
        result = {"attack": options.attack, "peers": options.peers, **{name: asdict(end) for name, end in ends.items()}}
        print(json.dumps({**result, "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()
