"""What trainers say about their progress in the DHT: reserved keys, and what may be kept there."""

from __future__ import annotations

from swarm.dht.schemas import Schema, integer, number, only_subkey, text

PROGRESS = "progress"
"""The namespace."""
MAX_COUNT = 1 << 62
MAX_SAMPLES_PER_S = 1e12


def progress_key(key: str) -> str:
    """Where those who train together under a key tell how far they are."""
    return f"{PROGRESS}/{key}"


PROGRESS_SCHEMA = Schema(
    required={"step": integer(0, MAX_COUNT), "samples": integer(0, MAX_COUNT)},
    optional={
        "epoch": integer(0, MAX_COUNT),
        "speed": number(0.0, MAX_SAMPLES_PER_S),
        "loss": number(),
        "phase": text(32),
    },
    place=only_subkey(""),
)
"""Steps and samples so far (of `epoch`, where there is one), samples per second, the last loss, what is being done."""
