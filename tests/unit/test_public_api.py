"""`import swarm`: fast, complete, documented."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import swarm

PROMISED = [
    "AllReduce",
    "DataShard",
    "ExpertGrid",
    "LocalSwarm",
    "MixtureOfExperts",
    "OptimizerSpec",
    "ParameterAveraging",
    "Peer",
    "PeerConfig",
    "RemoteExpert",
    "RemoteSequential",
    "TensorSpec",
    "attach",
    "create_run",
    "expert",
    "join",
    "optimizer",
]


def test_the_promised_names_are_exported() -> None:
    assert set(PROMISED) <= set(swarm.__all__)
    assert set(swarm.__all__) <= set(dir(swarm))


@pytest.mark.parametrize("name", [n for n in swarm.__all__ if n != "__version__"])
def test_every_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(swarm, name)
    doc = inspect.getdoc(value)
    assert doc
    assert doc != inspect.getdoc(type(value))
    assert len(doc) > 20
    if inspect.isclass(value):
        for method_name, method in inspect.getmembers(value, inspect.isfunction):
            public = not method_name.startswith("_") and method.__module__.startswith("swarm.")
            if public and method.__qualname__.startswith(value.__name__ + "."):
                assert inspect.getdoc(method) or method_name in ("to_dict",), f"{name}.{method_name} has no docstring"


def test_the_static_names_are_the_lazy_ones() -> None:
    source = inspect.getsource(swarm)
    static = {line.rsplit(" as ", 1)[1] for line in source.splitlines() if line.startswith("    from swarm.")}
    assert static == set(swarm.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = swarm.nonsense


def test_importing_swarm_loads_neither_torch_nor_grpc() -> None:
    script = """
import sys
import swarm
from swarm import ExpertGrid, OptimizerSpec, TensorSpec, PeerConfig, PeerId, KeyPair, SwarmError, Role
dir(swarm)
print([m for m in ("torch", "grpc", "numpy") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"
