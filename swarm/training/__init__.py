"""Training: attach an ordinary torch loop to a run, read data by peer, build models with the run's seed.

Torch loads when a name needs it. `attach` is in `swarm.training.attach`, and `swarm.attach`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.training.attach import Attachment, TrainingStats
    from swarm.training.averaging import ParameterAveraging
    from swarm.training.data import DataShard
    from swarm.training.seeding import seeded

_HOMES = {
    "Attachment": "swarm.training.attach",
    "TrainingStats": "swarm.training.attach",
    "ParameterAveraging": "swarm.training.averaging",
    "DataShard": "swarm.training.data",
    "seeded": "swarm.training.seeding",
}
__all__ = ["Attachment", "DataShard", "ParameterAveraging", "TrainingStats", "seeded"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
