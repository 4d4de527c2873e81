"""A program that runs several DHT peers over gRPC and obeys a parent: one JSON line in, one out, see `COMMANDS`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from swarm.net.loop import disable_grpc_fork_handlers, loop_thread

disable_grpc_fork_handlers()

from swarm.config import PeerConfig  # noqa: E402 - the fork handlers come first
from swarm.dht import Dht  # noqa: E402
from swarm.errors import NotStoredError  # noqa: E402
from swarm.identity import KeyPair, PeerId  # noqa: E402
from swarm.net.grpc import GrpcTransport  # noqa: E402
from swarm.net.security import OpenAuthorizer  # noqa: E402
from swarm.net.transport import Contact  # noqa: E402
from swarm.roles import ALL_ROLES  # noqa: E402
from swarm.runtime import Runtime  # noqa: E402

RUN_ID = bytes(range(32))
CONFIG = PeerConfig.preset("local")


class Peers:
    """The peers of this process, and what they did."""

    def __init__(self) -> None:
        self.dhts: list[Dht] = []
        self.lost: list[str] = []
        self.rounds = 0
        self.puts = 0
        self.loops: list[asyncio.Task[None]] = []
        self.stopping = False

    async def start(self, count: int, known: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        """Start peers that join through those known, or through the first of them."""
        contacts = [Contact(PeerId(bytes.fromhex(peer_id)), tuple(addresses)) for peer_id, addresses in known]
        made = []
        for _ in range(count):
            runtime = Runtime()
            transport = GrpcTransport(KeyPair.generate(), OpenAuthorizer(RUN_ID, ALL_ROLES), CONFIG, runtime)
            await transport.start()
            dht = Dht(transport, CONFIG.dht, runtime)
            await dht.start()
            await dht.bootstrap(contacts)
            self.dhts.append(dht)
            contacts.append(transport.contact)
            made.append((transport.peer_id.digest.hex(), list(transport.contact.addresses)))
        return made

    async def known(self) -> int:
        """How many others the least connected peer knows."""
        return min(len(dht.peers()) for dht in self.dhts)

    async def put(self, keys: list[str]) -> list[int]:
        """Publish each key; how many peers hold it."""
        return [await self.dhts[i % len(self.dhts)].put(key, key, ttl_s=300) for i, key in enumerate(keys)]

    async def work(self, keys: list[str], name: str) -> None:
        """Read all keys again and again, and publish others meanwhile, until `stop`."""
        self.loops = [asyncio.create_task(self._read(keys)), asyncio.create_task(self._write(name))]

    async def _read(self, keys: list[str]) -> None:
        while not self.stopping:
            for i, key in enumerate(keys):
                entries = await self.dhts[(i + self.rounds) % len(self.dhts)].get(key)
                if [entry.body for entry in entries] != [key]:
                    self.lost.append(key)
            self.rounds += 1

    async def _write(self, name: str) -> None:
        while not self.stopping:
            key = f"{name}/{self.puts}"
            try:
                await self.dhts[self.puts % len(self.dhts)].put(key, key, ttl_s=300)
            except NotStoredError:
                self.lost.append(key)
            self.puts += 1

    async def progress(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "puts": self.puts, "lost": self.lost}

    async def stop(self) -> dict[str, Any]:
        """End the work; what came of it."""
        self.stopping = True
        await asyncio.gather(*self.loops)
        return await self.progress()


COMMANDS = {name: getattr(Peers, name) for name in ("start", "known", "put", "work", "progress", "stop")}


def main() -> None:
    peers = Peers()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer = loop_thread().run(COMMANDS[command](peers, *arguments), 30.0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
