"""The DHT for the user's thread: the same operations, waiting for their results."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from swarm.dht.node import Dht, Put
from swarm.dht.records import Entry
from swarm.dht.watch import Watch

T = TypeVar("T")


class RunSync(Protocol):
    """Runs a coroutine on the DHT's loop and waits for it; raises `LoopThreadError` on that loop's own thread."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None, /) -> T: ...


class BlockingDht:
    """The records of a run, from any thread but the loop's. A peer has one: `peer.records`.

        peer.records.put("notes", {"lr": 3e-4}, ttl_s=3600)
        for entries in peer.records.watch("notes", timeout_s=60):
            print([entry.body for entry in entries])

    Every method raises what the method of `Dht` with the same name raises, and besides:

    - `LoopThreadError`: It was called on the loop thread, where it would wait for itself; use `peer.dht` there.
    - `ClosedError`: The peer has left the run.

    Args:
        dht: The DHT.
        run_sync: How to run something on its loop.
    """

    def __init__(self, dht: Dht, run_sync: RunSync) -> None:
        self._dht = dht
        self._run = run_sync

    def put(self, key: str, body: Any, *, subkey: str = "", ttl_s: float, renew: bool = True) -> int:
        """Publish our entry of a key; how many peers hold it. See `Dht.put`."""
        return self._run(self._dht.put(key, body, subkey=subkey, ttl_s=ttl_s, renew=renew))

    def put_many(self, items: Iterable[Put]) -> list[int]:
        """Publish several entries with shared requests; how many peers hold each. See `Dht.put_many`."""
        return self._run(self._dht.put_many(items))

    def get(self, key: str, *, fresh: bool = False, max_age_s: float = 0.0) -> list[Entry]:
        """The live entries of a key, ordered by author and subkey. See `Dht.get`."""
        return self._run(self._dht.get(key, fresh=fresh, max_age_s=max_age_s))

    def get_many(self, keys: Iterable[str], *, fresh: bool = False, max_age_s: float = 0.0) -> dict[str, list[Entry]]:
        """`get` for several keys with shared requests; every key is in the result. See `Dht.get_many`."""
        return self._run(self._dht.get_many(keys, fresh=fresh, max_age_s=max_age_s))

    def delete(self, key: str, subkey: str = "") -> None:
        """Withdraw our entry, if there is one. See `Dht.delete`."""
        self._run(self._dht.delete(key, subkey))

    def watch(self, key: str, *, every_s: float | None = None, timeout_s: float | None = None) -> Iterator[list[Entry]]:
        """The live entries of a key, and again after each change. See `Dht.watch`.

        Args:
            key: The key.
            every_s: Read at least this often while we wait.
            timeout_s: End the iteration when nothing has changed for so long; none waits for ever.
        """
        return _BlockingWatch(self._run(_begin(self._dht, key, every_s)), self._run, timeout_s)


class _BlockingWatch(Iterator[list[Entry]]):
    """Waits for a watch's next item. Holds nothing in between."""

    def __init__(self, watch: Watch, run_sync: RunSync, timeout_s: float | None) -> None:
        self._watch = watch
        self._run = run_sync
        self._timeout_s = timeout_s

    def __next__(self) -> list[Entry]:
        entries = self._run(self._next())
        if entries is None:
            raise StopIteration
        return entries

    async def _next(self) -> list[Entry] | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(self._watch, None)
        except TimeoutError:
            await self._watch.aclose()
            return None


async def _begin(dht: Dht, key: str, every_s: float | None) -> Watch:
    return dht.watch(key, every_s=every_s)
