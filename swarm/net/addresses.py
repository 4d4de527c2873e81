"""`host:port` addresses: reading them, and finding out which of ours others can dial."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from swarm.config import TransportConfig
from swarm.errors import ConfigError, PeerUnreachableError
from swarm.events import Event

MAX_DETECTED = 8
_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class LoopbackOnly(Event):
    """Only this machine can dial the addresses that the peer announces."""

    addresses: tuple[str, ...]
    reason: str


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port` or `[v6]:port`. Raises `PeerUnreachableError`."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    valid = colon and bare and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not valid or bracketed != (":" in bare) or not all(c.isalnum() or c in "-._:%" for c in bare):
        raise PeerUnreachableError(f"{address[:80]!r} is not an address.", fix="Write host:port, or [v6 address]:port.")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """The written form of host and port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the machine that dials it."""
    host = split_address(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def announced_addresses(config: TransportConfig, port: int) -> tuple[str, ...]:
    """What to tell others: the configured addresses, or the one listened on, or those of all network interfaces.

    Loopback is announced only when there is nothing else, or when it alone is listened on.

    Raises:
        ConfigError: A configured address is not `host:port`.
    """
    if config.announce:
        try:
            for address in config.announce:
                split_address(address)
        except PeerUnreachableError as error:
            raise ConfigError(f"transport.announce: {error.message}", fix=error.fix) from error
        return config.announce
    if config.listen_host not in _ANY:
        return (join_address(config.listen_host, port),)
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            wanted = (socket.AF_INET,) if config.listen_host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
            if name in up and entry.family in wanted:
                ip = ipaddress.ip_address(entry.address.partition("%")[0])
                if not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified):
                    found.append(ip)
    # Public addresses first: they are the ones that work for everybody.
    found.sort(key=lambda ip: (not ip.is_global, ip.version, int(ip)))
    addresses = tuple(join_address(str(ip), port) for ip in found[:MAX_DETECTED])
    return addresses or (join_address("127.0.0.1", port),)
