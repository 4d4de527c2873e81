"""How much a host can hold, and on which device."""

from __future__ import annotations

import psutil
import torch

from swarm.errors import ConfigError

_MEMORY_SHARE = 0.5
_COPIES_PER_PARAMETER = 5
"""Parameters, gradients, two moments, and a snapshot for other hosts."""
_EXPERT_FLOOR_BYTES = 1 << 20


def resolve_device(name: str) -> torch.device:
    """The device of a setting: `auto` is CUDA where there is one. Raises `ConfigError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The device {name!r} cannot be used: {error}", fix="Set host.device to 'cpu'.") from error
    return device


def memory_capacity(expert_bytes: int, device: torch.device) -> int:
    """How many experts of this size half of the free memory holds, optimizer state and snapshot included."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * _MEMORY_SHARE) // max(_EXPERT_FLOOR_BYTES, expert_bytes * _COPIES_PER_PARAMETER)
