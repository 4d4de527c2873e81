"""The links of several peers as one process: `python -m swarm.simulation.proxy`, and its parent's handle on it.

The process reads commands as JSON lines, answers each with one, and ends with its standard input. A process of its own
shares neither interpreter nor event loop with the peers whose traffic it shapes.
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import psutil

from swarm.errors import ProcessError, SwarmError, UsageError
from swarm.simulation.children import spawn
from swarm.simulation.links import Direction, Link
from swarm.simulation.shaping import Shape

ANSWER_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0


class Proxy:
    """The links of several peers, by name, on one loop."""

    def __init__(self, seed: int = 0) -> None:
        self.links: dict[str, Link] = {}
        self._seed = seed
        self._owners: dict[int, Link] = {}

    async def add(self, name: str, target: str, shape: Shape | None = None, port: int = 0) -> str:
        """Put a link in front of the peer that listens on `target`; the address that the peer has to announce."""
        if name in self.links:
            raise UsageError(f"There is a link for {name!r} already.")
        self.links[name] = link = Link(
            target, shape, seed=random.Random(f"{self._seed}/{name}").getrandbits(64), source=self._source
        )
        return await link.start(port=port)

    def own(self, name: str, pid: int) -> None:
        """Connections that this process opens belong to the named peer, and pass its link too."""
        link = self.link(name)
        self._owners = {known: owner for known, owner in self._owners.items() if owner is not link}
        self._owners[pid] = link

    def link(self, name: str) -> Link:
        """The link of a peer. Raises `UsageError`."""
        if name not in self.links:
            raise UsageError(f"There is no link for {name!r}.", fix=f"There are {', '.join(self.links) or 'none'}.")
        return self.links[name]

    async def _source(self, client: tuple[str, int], port: int) -> Link | None:
        if not self._owners:
            return None
        pid = await asyncio.to_thread(_pid_of, client[1], port, list(self._owners))
        return None if pid is None else self._owners.get(pid)

    async def close(self) -> None:
        """Close every link."""
        await asyncio.gather(*(link.close() for link in self.links.values()))


def _pid_of(client_port: int, server_port: int, pids: Sequence[int]) -> int | None:
    """Which of these processes has a connection from one port to the other."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            listing = getattr(process, "net_connections", None) or process.connections  # its name until psutil 6
            for found in listing(kind="tcp"):
                if found.laddr.port == client_port and found.raddr and found.raddr.port == server_port:
                    return pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


async def execute(proxy: Proxy, command: dict[str, Any]) -> dict[str, Any]:
    """Do what a command says. Raises `UsageError`."""
    arguments = dict(command)
    what, name = arguments.pop("do"), arguments.pop("name", "")
    match what:
        case "add":
            target, port, pid = arguments.pop("target"), arguments.pop("port", 0), arguments.pop("pid", None)
            address = await proxy.add(name, target, Shape(**arguments), port)
            if pid is not None:
                proxy.own(name, pid)
            return {"address": address}
        case "own":
            proxy.own(name, arguments["pid"])
        case "change":
            proxy.link(name).change(**arguments)
        case "stall":
            proxy.link(name).stall(arguments.get("seconds"))
        case "resume":
            proxy.link(name).resume()
        case "swallow":
            proxy.link(name).swallow(arguments.get("seconds"), arguments.get("direction", "both"))
        case "heal":
            proxy.link(name).heal()
        case "reset":
            return {"connections": proxy.link(name).reset()}
        case "half_open":
            return {"connections": proxy.link(name).half_open()}
        case "stats":
            link = proxy.link(name)
            return {
                "connections": len(link.connections),
                "accepted": link.accepted,
                "buffered_bytes": link.buffered_bytes,
                "up_bytes": link.up.nbytes,
                "down_bytes": link.down.nbytes,
            }
        case _:
            raise UsageError(f"A proxy cannot {what!r}.")
    return {}


async def serve_commands() -> None:
    """Execute commands from standard input, one JSON object a line, until it ends."""
    proxy = Proxy(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answer = await execute(proxy, json.loads(line))
            except SwarmError as error:
                answer = {"error": error.message, "fix": error.fix}
            except (KeyError, TypeError, ValueError, OSError) as error:
                answer = {"error": repr(error), "fix": None}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        await proxy.close()


class ProxyProcess:
    """A process of links, from its parent's side. A context manager; methods block for a moment.

    Args:
        seed: Decides jitter and which bytes are damaged.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] = spawn(["swarm.simulation.proxy", str(seed)], answers=True)
        self._reader = threading.Thread(target=self._read, name="swarm-proxy-answers", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _do(self, what: str, name: str, **arguments: Any) -> dict[str, Any]:
        command = json.dumps({"do": what, "name": name, **arguments}).encode() + b"\n"
        with self._lock:
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(command)
                self._process.stdin.flush()
                line = self._answers.get(timeout=ANSWER_TIMEOUT_S)
            except (OSError, ValueError, queue.Empty) as error:
                raise ProcessError("The proxy process does not answer.") from error
        if not line:
            raise ProcessError("The proxy process has ended.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UsageError(answer["error"], fix=answer["fix"])
        return answer

    def add(self, name: str, target: str, *, port: int = 0, pid: int | None = None, **shape: Any) -> str:
        """Put a link in front of a peer.

        Args:
            target: `host:port` on which the peer listens, now or later.
            port: Where the link listens; 0 takes a free port.
            pid: The peer's process, if it is known already; see `own`.
            shape: Fields of `Shape`.

        Returns:
            The address that the peer has to announce.
        """
        return str(self._do("add", name, target=target, port=port, pid=pid, **shape)["address"])

    def own(self, name: str, pid: int) -> None:
        """Connections that this process opens belong to the named peer, and pass its link too. One process a link."""
        self._do("own", name, pid=pid)

    def shape(self, name: str, **changes: Any) -> None:
        """Change fields of a link's `Shape`."""
        self._do("change", name, **changes)

    def stall(self, name: str, seconds: float | None = None) -> None:
        """Let nothing pass a link, for `seconds` or until `resume`. Returns at once."""
        self._do("stall", name, seconds=seconds)

    def resume(self, name: str) -> None:
        """End a stall."""
        self._do("resume", name)

    def swallow(self, name: str, seconds: float | None = None, direction: Direction = "both") -> None:
        """Lose all that passes a link, for `seconds` or until `heal`; see `Link.swallow`. Returns at once."""
        self._do("swallow", name, seconds=seconds, direction=direction)

    def heal(self, name: str) -> None:
        """Swallow nothing more."""
        self._do("heal", name)

    def reset(self, name: str) -> int:
        """Break all connections through a link, for both ends; how many there were."""
        return int(self._do("reset", name)["connections"])

    def half_open(self, name: str) -> int:
        """Break all connections through a link, without a word to those at the far end; how many there were."""
        return int(self._do("half_open", name)["connections"])

    def stats(self, name: str) -> dict[str, int]:
        """`connections`, `accepted` in total, `buffered_bytes`, and `up_bytes` and `down_bytes` that passed."""
        return self._do("stats", name)

    def close(self) -> None:
        """End the process, and with it all its links. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:  # it is gone already
                self._process.kill()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which a peer behind a link can listen. (Free now: nothing keeps it so.)"""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    asyncio.run(serve_commands())
