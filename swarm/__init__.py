"""swarm: train one PyTorch model together over the internet, on machines that come, go, stall and lie.

The names below are the public API. They load on first use, so that `import swarm` is fast and pulls in neither torch
nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from swarm.averaging.allreduce import AllReduce as AllReduce
    from swarm.averaging.averager import Averager as Averager
    from swarm.averaging.gossip import Gossip as Gossip
    from swarm.averaging.gossip import PushSum as PushSum
    from swarm.averaging.robust import CenteredClip as CenteredClip
    from swarm.averaging.robust import Median as Median
    from swarm.averaging.robust import TrimmedMean as TrimmedMean
    from swarm.averaging.rounds import Round as Round
    from swarm.config import PeerConfig as PeerConfig
    from swarm.dht.node import Put as Put
    from swarm.dht.records import Entry as Entry
    from swarm.errors import SwarmError as SwarmError
    from swarm.experts.moe import MixtureOfExperts as MixtureOfExperts
    from swarm.experts.remote import RemoteExpert as RemoteExpert
    from swarm.experts.sequential import RemoteSequential as RemoteSequential
    from swarm.experts.spec import ExpertGrid as ExpertGrid
    from swarm.experts.spec import OptimizerSpec as OptimizerSpec
    from swarm.experts.spec import TensorSpec as TensorSpec
    from swarm.experts.spec import expert as expert
    from swarm.experts.spec import optimizer as optimizer
    from swarm.identity import KeyPair as KeyPair
    from swarm.identity import PeerId as PeerId
    from swarm.peer import Peer as Peer
    from swarm.roles import Role as Role
    from swarm.run import Run as Run
    from swarm.run import create_run as create_run
    from swarm.run import join as join
    from swarm.simulation.local import LocalSwarm as LocalSwarm
    from swarm.training.attach import ParameterAveraging as ParameterAveraging
    from swarm.training.attach import attach as attach
    from swarm.training.data import DataShard as DataShard
    from swarm.training.seeding import seeded as seeded

_HOMES = {
    "AllReduce": "swarm.averaging.allreduce",
    "Averager": "swarm.averaging.averager",
    "CenteredClip": "swarm.averaging.robust",
    "DataShard": "swarm.training.data",
    "Entry": "swarm.dht.records",
    "ExpertGrid": "swarm.experts.spec",
    "Gossip": "swarm.averaging.gossip",
    "KeyPair": "swarm.identity",
    "LocalSwarm": "swarm.simulation.local",
    "Median": "swarm.averaging.robust",
    "MixtureOfExperts": "swarm.experts.moe",
    "OptimizerSpec": "swarm.experts.spec",
    "ParameterAveraging": "swarm.training.attach",
    "Peer": "swarm.peer",
    "PeerConfig": "swarm.config",
    "PeerId": "swarm.identity",
    "PushSum": "swarm.averaging.gossip",
    "Put": "swarm.dht.node",
    "RemoteExpert": "swarm.experts.remote",
    "RemoteSequential": "swarm.experts.sequential",
    "Role": "swarm.roles",
    "Round": "swarm.averaging.rounds",
    "Run": "swarm.run",
    "SwarmError": "swarm.errors",
    "TensorSpec": "swarm.experts.spec",
    "TrimmedMean": "swarm.averaging.robust",
    "attach": "swarm.training.attach",
    "create_run": "swarm.run",
    "expert": "swarm.experts.spec",
    "join": "swarm.run",
    "optimizer": "swarm.experts.spec",
    "seeded": "swarm.training.seeding",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'swarm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
