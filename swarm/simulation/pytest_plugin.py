"""The pytest fixture `local_swarm`, available wherever swarm is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from swarm.simulation.local import LocalSwarm


class LocalSwarmFactory(Protocol):
    """Takes the arguments of `LocalSwarm` and returns it started."""

    def __call__(self, *args: Any, **kwargs: Any) -> LocalSwarm: ...


@pytest.fixture
def local_swarm() -> Iterator[LocalSwarmFactory]:
    """A factory of started `LocalSwarm`s, all closed at the end of the test."""
    from contextlib import ExitStack

    from swarm.simulation.local import LocalSwarm

    with ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> LocalSwarm:
            return stack.enter_context(LocalSwarm(*args, **kwargs))

        yield start
