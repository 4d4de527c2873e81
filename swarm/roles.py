"""Roles: what a peer does in a run. Roles configure one `Peer`; they are not subclasses."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    HOST = "host"
    """Holds experts."""
    TRAINER = "trainer"
    """Drives training."""
    BOOTSTRAP = "bootstrap"
    """A first contact for joining peers; holds records."""
    RELAY = "relay"
    """Forwards traffic for peers that cannot be dialled."""
    MONITOR = "monitor"
    """Watches; changes nothing."""


ALL_ROLES: frozenset[Role] = frozenset(Role)
