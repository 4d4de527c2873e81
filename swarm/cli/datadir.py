"""Where commands keep identities, keys and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path


def swarm_home() -> Path:
    """`$SWARM_HOME`, or `.swarm` in the user's home folder."""
    return Path(os.environ.get("SWARM_HOME") or Path.home() / ".swarm")
