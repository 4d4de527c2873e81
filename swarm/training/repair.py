"""Repair of a trainer that ended a round with other values than its group: it takes those for which most of it vouch.

Whom it may believe: values count only if more than half of the *whole* group told, in the round, that they hold the
same, and as many offer the same content afterwards, hash by hash. As long as fewer than half of a group lie, nobody is
talked into their values. Without such a majority (one against one) nobody is repaired.

What it costs: the chunks in which the values differ. Local progress made since the round stays. The next round of the
group may come first. Then there is nothing left to repair, for all its members hold the same bits after it; but what
this trainer held wrongly is in its mean, with this trainer's weight. A round without a group, or one in which this
trainer diverges again, changes nothing, and the repair goes on or begins anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from swarm.averaging.rounds import Group, Round
from swarm.endpoint import Endpoint
from swarm.errors import NoDonorError, SwarmError
from swarm.events import Event
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.state.snapshot import ChunkManifest, PartialSnapshot, Snapshot
from swarm.state.transfer import STATE_LIMITS, fetch_manifest, fetch_snapshot
from swarm.tensors.schema import check_finite
from swarm.training.state import announced

KEPT_ROUNDS = 8
"""A snapshot names so many rounds that it has seen."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two looks at what donors offer."""


class RepairFailure(Enum):
    """Why a trainer was not repaired; the value is told to people."""

    NO_MAJORITY = "no more than half of the group hold the same values"
    NO_DONOR = "not enough of those who agreed offered the same values in time"
    ENDED = "training ended first"


@dataclass(frozen=True, slots=True)
class StateRepaired(Event):
    """A trainer that had other values than its group holds the group's again, with its own progress since.

    Attributes:
        round: The nonce of the round after which it had others.
        donor: Who gave the values; empty if a later round came first and made all its members equal.
        nbytes: What had to be downloaded.
        seconds: Since the end of that round.
    """

    key: str
    round: str
    donor: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StateNotRepaired(Event):
    """Members of a group hold different values, and this trainer keeps its own until the next round."""

    key: str
    round: str
    failure: RepairFailure
    detail: str = ""


def average_key(key: str) -> str:
    """Under this trainers offer the values of their last round to members that have others."""
    return f"average/{key}"


@dataclass(frozen=True, slots=True)
class Repaired:
    """What to take."""

    snapshot: Snapshot
    donor: PeerId
    nbytes: int


class Repair:
    """One repair, on the loop while training goes on. The thread that owns the tensors asks and applies.

    Args:
        outcome: The round after which this trainer has other values than most.
        ours: Those values.
        timeout_s: The repair is given up then.
    """

    def __init__(self, endpoint: Endpoint, key: str, outcome: Round, ours: Snapshot, timeout_s: float) -> None:
        assert isinstance(outcome.outcome, Group)
        assert endpoint.loop is not None
        self.nonce = outcome.outcome.nonce
        self._endpoint = endpoint
        self._key = key
        self._ours = ours
        self._begun = endpoint.runtime.clock.time()
        self._future: Future[Repaired] = endpoint.loop.submit(find_agreed(endpoint, key, outcome, ours, timeout_s))

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is done, but not longer than that."""
        try:
            self._future.exception(timeout_s)
        except TimeoutError:
            return

    def apply(self, tensors: Sequence[Tensor]) -> Snapshot | None:
        """Write what was found, and tell; none if nothing was. Call it when `done`."""
        try:
            found = self._future.result()
        except SwarmError as error:
            self._tell(StateNotRepaired(self._key, self.nonce, RepairFailure.NO_DONOR, error.message))
            return None
        pairs = zip(self._ours.tensors.values(), found.snapshot.tensors.values(), strict=True)
        with torch.no_grad():
            for tensor, (ours, theirs) in zip(tensors, pairs, strict=True):
                _move(tensor, ours.to(tensor.device), theirs.to(tensor.device))
        self._tell(StateRepaired(self._key, self.nonce, str(found.donor), found.nbytes, self._seconds))
        return found.snapshot

    def overtaken(self) -> None:
        """A later round made its members equal."""
        self._future.cancel()
        self._tell(StateRepaired(self._key, self.nonce, "", 0, self._seconds))

    def cancel(self, failure: RepairFailure | None = None) -> None:
        """Give it up, and tell why unless what comes next will."""
        self._future.cancel()
        if failure is not None:
            self._tell(StateNotRepaired(self._key, self.nonce, failure))

    @property
    def _seconds(self) -> float:
        return self._endpoint.runtime.clock.time() - self._begun

    def _tell(self, event: Event) -> None:
        self._endpoint.runtime.emit(event)


def _move(tensor: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Exactly theirs where the tensor still is what we had, else theirs and what has been added to ours since."""
    tensor.copy_(torch.where(tensor == ours, theirs, tensor + (theirs - ours)))


async def find_agreed(endpoint: Endpoint, key: str, outcome: Round, ours: Snapshot, timeout_s: float) -> Repaired:
    """The values of this round or a newer one for which more than half of its group vouch.

    Args:
        outcome: A round with a majority to which this peer does not belong.
        ours: Whose chunks need not travel where they are right.

    Raises:
        NoDonorError: They did not offer the same in time.
    """
    assert isinstance(outcome.outcome, Group)
    assert outcome.majority
    clock, detail = endpoint.runtime.clock, ""
    end, pause_s, needed = clock.time() + timeout_s, FIRST_PAUSE_S, len(outcome.members) // 2 + 1
    manifest = await endpoint.runtime.offload(lambda: ours.manifest)
    while (left_s := end - clock.time()) > 0:
        try:
            contacts = [c for c in await announced(endpoint, key) if str(c.peer_id) in outcome.agreed]
        except SwarmError as error:
            contacts, detail = [], error.message
        offers = await _offers(endpoint, key, contacts, outcome.outcome.nonce, manifest, left_s)
        votes = Counter(offers.values())
        best = max(votes, key=lambda hashes: votes[hashes], default=b"")
        if votes[best] >= needed:
            for donor in (c for c in contacts if offers.get(c.peer_id) == best):
                try:
                    return await _download(endpoint, key, donor, ours, best, max(0.0, end - clock.time()))
                except SwarmError as error:
                    detail = f"{donor.peer_id.short}: {error.message}"
        else:
            detail = f"{votes[best]} of the {needed} that are needed offer the same"
        await asyncio.sleep(min(pause_s, max(0.0, end - clock.time())))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise NoDonorError(f"{RepairFailure.NO_DONOR.value}: {detail}", fix="The next round makes its members equal.")


async def _offers(
    endpoint: Endpoint, key: str, donors: Sequence[Contact], nonce: str, ours: ChunkManifest, timeout_s: float
) -> dict[PeerId, bytes]:
    """Hashes of what donors offer of this round or a later one; who offers an older one is asked again later."""
    limits = replace(STATE_LIMITS, max_payload_bytes=ours.layout.nbytes, max_tensors=len(ours.layout.entries))
    found: dict[PeerId, bytes] = {}

    async def ask(donor: Contact) -> None:
        patience_s = min(endpoint.config.averaging.chunk_timeout_s, timeout_s)
        try:
            theirs = await fetch_manifest(endpoint, donor, average_key(key), limits, patience_s)
        except SwarmError:
            return
        rounds = theirs.metadata().get("rounds")
        fits = (theirs.layout, theirs.chunk_bytes) == (ours.layout, ours.chunk_bytes)
        if fits and isinstance(rounds, list) and nonce in rounds:
            found[donor.peer_id] = theirs.chunk_hashes

    async with asyncio.TaskGroup() as group:
        for donor in donors:
            group.create_task(ask(donor))
    return found


async def _download(
    endpoint: Endpoint, key: str, donor: Contact, ours: Snapshot, hashes: bytes, timeout_s: float
) -> Repaired:
    partial = await endpoint.runtime.offload(PartialSnapshot.of, ours)
    had = [ours.manifest.chunk_hash(i) for i in range(ours.manifest.chunk_count)]
    snapshot = await fetch_snapshot(endpoint, donor, average_key(key), timeout_s=timeout_s, resume=partial)
    manifest = snapshot.manifest
    if manifest.chunk_hashes != hashes or manifest.layout != ours.manifest.layout:
        raise NoDonorError(f"{donor.peer_id.short} offers something else by now.", fix="Look again.")
    await endpoint.runtime.offload(_check_finite, snapshot)
    new = [manifest.span(i) for i, before in enumerate(had) if manifest.chunk_hash(i) != before]
    return Repaired(snapshot, donor.peer_id, sum(span.stop - span.start for span in new))


def _check_finite(snapshot: Snapshot) -> None:
    for name, tensor in snapshot.tensors.items():
        check_finite(tensor, f"the average of {name!r}")
