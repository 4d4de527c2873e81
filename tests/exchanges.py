"""A group that exchanges once in virtual time, with members that fail at a chosen message, and what must hold then."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from swarm.averaging.bandwidth import Bandwidths
from swarm.averaging.exchange import EXCHANGE, Exchange
from swarm.averaging.probation import Offence
from swarm.averaging.robust import Reducer
from swarm.averaging.rounds import Member, RoundReport, Seal
from swarm.averaging.vector import FlatVector
from swarm.config import PeerConfig
from swarm.errors import NoGroupError
from swarm.identity import PeerId
from swarm.net.memory import MemoryNetwork, MemoryTransport
from swarm.net.security import OpenAuthorizer
from swarm.net.transport import ByteStream, CallContext, StreamHandler
from swarm.pb.averaging_pb2 import ExchangeHello
from swarm.roles import ALL_ROLES
from swarm.simulation.virtual import VirtualLoop, VirtualRuntime, run_virtual
from swarm.tensors.codecs import codec as find_codec
from swarm.tensors.feedback import ErrorFeedback
from swarm.tensors.partition import split
from swarm.tensors.schema import TensorMeta
from tests.support import RUN_ID, deterministic_identity

CHUNK_TIMEOUT_S = 2.0
ROUND_TIMEOUT_S = 20.0
FAULTS = ("dies", "vanishes", "stalls", "pauses", "sends NaN", "sends rubbish")


@dataclass(frozen=True)
class Fault:
    """What happens to a member at one of its messages in the exchange.

    Attributes:
        member: Its place in the group.
        kind: `dies` (its connections break), `vanishes` (nothing more is heard of it), `stalls`, `pauses` (stalls for
            `pause_s`), `sends NaN`, `sends rubbish` (from then on).
        at: Number of the message that it sends.
    """

    member: int
    kind: str
    at: int
    pause_s: float = 1.0


@dataclass
class Played:
    """How an exchange went.

    Attributes:
        values: What each member had before, flat.
        after: What it has in the end.
        chunks: Where each chunk begins and ends in that.
        reports: What it noted; only of members that came to an end.
        seconds: How long it took, by member.
        offences: Who was told on, by member that told.
        messages: How many messages each member sent in the exchange.
    """

    values: list[Tensor]
    vectors: list[FlatVector]
    chunks: list[tuple[int, int]]
    weights: list[float]
    ids: list[PeerId]
    after: list[Tensor] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    reports: dict[int, RoundReport] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    offences: list[tuple[int, PeerId, Offence]] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)


class Group:
    """Members with transports on one network, who exchange as often as wanted.

    Args:
        weights: Of the members' values.
        parts: Elements that each reduces.
        upload_bytes_s: Limit of every member's uploads.
        reducer, verify: As for `AllReduce`.
    """

    def __init__(
        self,
        weights: list[float],
        parts: list[int],
        *,
        seed: int = 0,
        chunk_bytes: int = 256,
        upload_bytes_s: float | None = None,
        reducer: Reducer = "mean",
        verify: bool = False,
    ) -> None:
        self.reducer = reducer
        self.verify = verify
        self.weights = weights
        self.parts = parts
        self.config = PeerConfig.preset(
            "local",
            averaging={
                "chunk_timeout_s": CHUNK_TIMEOUT_S,
                "round_timeout_s": ROUND_TIMEOUT_S,
                "chunk_bytes": chunk_bytes,
            },
            transport={"max_upload_bytes_s": upload_bytes_s},
        )
        self.network = MemoryNetwork(seed, latency=lambda a, b, rng: 0.005 + 0.02 * rng.random(), modelled_hello=True)
        self.transports: list[MemoryTransport] = []
        self.exchanges: dict[PeerId, tuple[bytes, Exchange]] = {}
        self.bandwidths = [Bandwidths() for _ in weights]
        self.feedbacks: list[ErrorFeedback | None] = [None] * len(weights)
        self.seed = seed
        self._rounds = 0

    async def start(self) -> None:
        """Start the members and let them say hello to each other."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for index in range(len(self.weights)):
            runtime = VirtualRuntime(loop, self.seed, f"member {index}")
            transport = MemoryTransport(
                deterministic_identity(f"member {index}"),
                OpenAuthorizer(RUN_ID, ALL_ROLES),
                self.config,
                runtime,
                self.network,
            )
            transport.serve_stream(EXCHANGE, self._handler(transport))
            await transport.start()
            self.transports.append(transport)
        for one in self.transports:
            for other in self.transports:
                if one is not other:
                    await one.dial(other.contact.addresses[0])

    def _handler(self, transport: MemoryTransport) -> StreamHandler:
        async def handle(context: CallContext, stream: ByteStream) -> None:
            hello = ExchangeHello()
            hello.ParseFromString(await stream.receive() or b"")
            nonce, exchange = self.exchanges[transport.peer_id]
            if nonce != hello.nonce:
                raise NoGroupError("This peer is in no such group.")
            await exchange.serve(context.peer_id, hello, stream)

        return handle

    async def exchange(
        self, vectors: list[FlatVector], faults: tuple[Fault, ...] = (), stochastic: bool = False
    ) -> Played:
        """One exchange of a vector for each member, in place."""
        members = tuple(
            Member(t.peer_id, t.contact.addresses, w, p)
            for t, w, p in zip(self.transports, self.weights, self.parts, strict=True)
        )
        self._rounds += 1
        seal = Seal(random.Random(f"{self.seed}/{self._rounds}").randbytes(16), b"s" * 32, members)
        values = [vector.flat() for vector in vectors]
        played = Played(
            values,
            vectors,
            _chunk_places(vectors[0], self.parts, self.config.averaging.chunk_bytes),
            self.weights,
            [m.peer_id for m in members],
        )
        played.messages = [0] * len(members)
        self.network.corrupt = self._injector(played, {f.member: f for f in faults})
        for index, transport in enumerate(self.transports):
            report = RoundReport()
            exchange = Exchange(
                seal,
                vectors[index],
                self.weights[index],
                report,
                transport=transport,
                runtime=transport.runtime,
                config=self.config.averaging,
                feedback=self.feedbacks[index],
                stochastic=stochastic,
                reducer=self.reducer,
                verify=self.verify,
                bandwidth=self.bandwidths[index],
                on_offender=lambda peer, offence, _, me=index: played.offences.append((me, peer, offence)),  # type: ignore[misc]
            )
            played.exchanges.append(exchange)
            self.exchanges[transport.peer_id] = (seal.nonce, exchange)
            transport.runtime.spawn(self._run(index, exchange, report, played), f"exchange {index}")
        dead = [f.member for f in faults if f.kind in ("dies", "vanishes")]
        frozen = [f.member for f in faults if f.kind == "stalls"]
        waited = [i for i in range(len(members)) if i not in dead and i not in frozen]
        begun = asyncio.get_running_loop().time()
        while any(i not in played.reports for i in waited):
            await asyncio.sleep(0.05)
            late_s = asyncio.get_running_loop().time() - begun
            assert late_s < ROUND_TIMEOUT_S + 3 * CHUNK_TIMEOUT_S, "an exchange hangs"
        self.network.corrupt = None
        played.after = [vector.flat() for vector in vectors]
        return played

    async def _run(self, index: int, exchange: Exchange, report: RoundReport, played: Played) -> None:
        begun = self.transports[index].runtime.clock.time()
        await exchange.run()
        played.seconds[index] = self.transports[index].runtime.clock.time() - begun
        played.reports[index] = report

    def _injector(self, played: Played, faults: dict[int, Fault]) -> Callable[[PeerId, PeerId, str, bytes], bytes]:
        loop = asyncio.get_running_loop()
        place = {peer: index for index, peer in enumerate(played.ids)}

        def corrupt(source: PeerId, target: PeerId, path: str, data: bytes) -> bytes:
            if path != EXCHANGE.path:
                return data
            index = place[source]
            number = played.messages[index]
            played.messages[index] += 1
            fault = faults.get(index)
            if fault is None or number < fault.at:
                return data
            if number == fault.at:
                if fault.kind in ("dies", "vanishes"):
                    loop.call_soon(lambda: self.network.kill(source, silent=fault.kind == "vanishes"))
                elif fault.kind in ("stalls", "pauses"):
                    self.network.freeze(source)
                    if fault.kind == "pauses":
                        loop.call_later(fault.pause_s, self.network.thaw, source)
            is_chunk = len(data) % 4 == 0 and len(data) > 4
            if fault.kind == "sends NaN" and is_chunk:
                return torch.full((len(data) // 4,), math.nan).numpy().tobytes()
            if fault.kind == "sends rubbish" and number == fault.at:
                return b"rubbish"
            return data

        return corrupt

    async def close(self) -> None:
        for transport in self.transports:
            self.network.thaw(transport.peer_id)
            await transport.close(grace_s=0.0)


def _chunk_places(vector: FlatVector, parts: list[int], chunk_bytes: int) -> list[tuple[int, int]]:
    bases = [sum(segment.numel for segment in vector.segments[:i]) for i in range(len(vector.segments))]
    found, start = [], 0
    for part in parts:
        chunks = vector.chunks(start, start + part, chunk_bytes)
        found.extend((bases[c.segment] + c.start, bases[c.segment] + c.stop) for c in chunks)
        start += part
    return found


def vectors_of(rows: list[list[Tensor]], codec: str = "none") -> list[FlatVector]:
    """A vector over each row of tensors, all of which travel with the codec."""
    return [FlatVector([TensorMeta.of(t) for t in row], [find_codec(codec)] * len(row), over=row) for row in rows]


def check(played: Played, faults: tuple[Fault, ...]) -> dict[str, int]:
    """Each chunk of each survivor is local, or the mean over all survivors and perhaps others; never a mix.

    Survivors with an average of a chunk hold the same bits. Counts chunks by kind.
    """
    faulty = {f.member for f in faults}
    survivors = [i for i in range(len(played.values)) if i not in faulty]
    counting = [i for i in survivors if played.weights[i] > 0]
    others = [i for i in sorted(faulty) if played.weights[i] > 0]
    subsets = [(*counting, *more) for k in range(len(others) + 1) for more in combinations(others, k)]
    means = [_mean(played, subset) for subset in subsets if subset]
    counts = {"local": 0, "all": 0, "some": 0}
    for start, stop in played.chunks:
        seen: Tensor | None = None
        for i in survivors:
            mine, before = played.after[i][start:stop], played.values[i][start:stop]
            if torch.equal(mine, before):
                counts["local"] += 1
                continue
            fitting = [k for k, m in enumerate(means) if torch.allclose(mine.double(), m[start:stop], 1e-6, 1e-6)]
            assert fitting, f"chunk {start}-{stop} of member {i} is neither local nor a mean with all survivors"
            counts["all" if fitting[0] == len(means) - 1 else "some"] += 1
            assert seen is None or torch.equal(mine, seen), f"chunk {start}-{stop} differs between survivors"
            seen = mine
    _check_agreement(played, survivors)
    return counts


def _mean(played: Played, members: tuple[int, ...]) -> Tensor:
    weights = [played.weights[i] for i in members]
    return sum(w * played.values[i].double() for w, i in zip(weights, members, strict=True)) / sum(weights)  # type: ignore[return-value]


def _check_agreement(played: Played, survivors: list[int]) -> None:
    place = {peer: index for index, peer in enumerate(played.ids)}
    for i in survivors:
        agreed = [place[peer] for peer in played.reports[i].agreed if place[peer] in survivors]
        for a, b in combinations(agreed, 2):
            for start, stop in played.chunks:
                kept = all(torch.equal(played.after[m][start:stop], played.values[m][start:stop]) for m in (a, b))
                same = torch.equal(played.after[a][start:stop], played.after[b][start:stop])
                assert same or kept, "members that hold different averages agree"


def random_group(rng: random.Random, least: int = 2, most: int = 6) -> tuple[list[float], list[int]]:
    """Weights and parts of a group, some of whose members only receive, or reduce nothing."""
    size = rng.randint(least, most)
    weights = [rng.choice([1.0, 1.0, 2.5, 0.0]) for _ in range(size)]
    shares = [rng.choice([1.0, 1.0, 0.5, 0.0]) for _ in range(size)]
    shares[rng.randrange(size)] = 1.0
    return weights, [len(part) for part in split(rng.randint(size, 1500), shares)]


async def play_with_faults(seed: int, verify: bool = False) -> tuple[Played, tuple[Fault, ...]]:
    """One exchange of a random group in which one or two members fail at random messages."""
    rng = random.Random(seed)
    weights, parts = random_group(rng)
    group = Group(weights, parts, seed=seed, verify=verify)
    await group.start()
    generator = torch.Generator().manual_seed(seed)
    vectors = vectors_of([[torch.randn(sum(parts), generator=generator)] for _ in weights])
    size = len(weights)
    expected = [(size - 1) * (len(range(0, part, 64)) + 3) + sum(parts) // 64 for part in parts]
    members = rng.sample(range(size), min(rng.choice([1, 1, 2]), size - 1))
    faults = tuple(
        Fault(m, rng.choice(FAULTS), rng.randrange(1 + expected[m]), rng.choice([0.3, 1.0, 4.0])) for m in members
    )
    played = await group.exchange(vectors, faults)
    await group.close()
    return played, faults


def survive_faults(seeds: Iterable[int]) -> None:
    """Play an exchange with faults for each seed: survivors end in time, with their mean or local values."""
    counts = {"local": 0, "all": 0, "some": 0}
    for seed in seeds:

        async def main(seed: int = seed) -> None:
            played, faults = await play_with_faults(seed)
            try:
                for kind, count in check(played, faults).items():
                    counts[kind] += count
                slowest = max(s for i, s in played.seconds.items() if i not in {f.member for f in faults})
                assert slowest <= ROUND_TIMEOUT_S + CHUNK_TIMEOUT_S
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {faults}: {error}") from error

        run_virtual(main, seed)
    assert min(counts.values()) > 0, f"the faults do not bite: {counts}"
