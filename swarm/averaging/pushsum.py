"""Push-sum's bookkeeping without I/O: whose mass is where, whatever the network loses, repeats or delays.

Every peer holds (x, w), w = 1 at the start, and uses z = x / w. A step sends 1 / (k + 1) of both to each of k peers and
adds what arrived [Assran 2019, stochastic gradient push; Kempe 2003]. The sums of x and of w over all peers must not
change, for their ratio is what everybody converges to. So a share leaves its sender's mass when it is sent, counts at
most once at its receiver, and comes back to the sender exactly when it is certain that it did not and will not count:

- The sender still has a piece of it, or the receiver refuses it: it comes back at once.
- No answer: it stays open, and its sender asks the receiver about it by its id until there is an answer. A receiver
  that is asked about a share it has not taken refuses it from then on, which makes the answer final.
- The receiver is silent for good: after a bound the share comes back. If the receiver had taken it and is still alive
  (a network cut in two), this share counts twice from then on: the sum of w exceeds the number of peers by its weight,
  and the values that it held weigh so much more. If the receiver died, all it held died with it, and only this share is
  restored: the mean moves by what the dead peer held beside it, as if it had never been there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.identity import PeerId

T = TypeVar("T")

MAX_OPEN = 8
"""Shares of one sender whose fate is open; with so many it sends no more."""
MAX_WAITING = 16
"""Shares that a peer takes between two of its steps: a stalled peer must not swallow the others' mass."""
LEAST_WEIGHT = 2.0**-20
"""Who holds less keeps it: a peer to which nobody sends would otherwise give all of its mass away."""
MAX_INCARNATIONS = 8
MAX_SENDERS = 4096
FATES_PER_SENDER = 4 * MAX_OPEN
INCARNATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Tag:
    """Names a share for ever: random bytes of the sending averager, and a number that only grows."""

    incarnation: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Share(Generic[T]):
    """Mass that has left its sender.

    Attributes:
        weight: Its part of w.
        content: Its z, in the form in which it travels; its x is weight * z.
        settled_below: The sender asks the receiver about no share with a lower number any more.
    """

    tag: Tag
    to: PeerId
    weight: float
    content: T
    settled_below: int


class Ledger(Generic[T]):
    """One peer's weight: what it holds, what waits to be added to its values, and what is under way.

    Args:
        incarnation: Random bytes, other ones for every ledger of a peer.
    """

    def __init__(self, incarnation: bytes, weight: float = 1.0) -> None:
        self.weight = weight
        """What belongs to the values as they are."""
        self.waiting = 0.0
        """What has arrived or come back since they were last brought up to date."""
        self.arrivals = 0
        """Shares of others in it."""
        self._incarnation = incarnation
        self._next = 0
        self._open: dict[int, Share[T]] = {}

    @property
    def open(self) -> list[Share[T]]:
        """Shares whose fate is not known, in the order in which they left."""
        return list(self._open.values())

    @property
    def under_way(self) -> float:
        """The weight of open shares."""
        return sum(share.weight for share in self._open.values())

    def can_send(self, count: int) -> int:
        """To how many of `count` peers shares may be sent now."""
        return 0 if self.weight < LEAST_WEIGHT else max(0, min(count, MAX_OPEN - len(self._open)))

    def split(self, to: Sequence[PeerId], content: T, keep: bool = True) -> list[Share[T]]:
        """Take an equal share for each of `to` out of the mass; one more stays here, unless `keep` is off.

        What waits must have been added to the values before, for `content` stands for them.
        """
        assert len(to) == self.can_send(len(to)), "more shares than may be open"
        part = self.weight / (len(to) + keep)
        self.weight = part if keep else 0.0
        made: list[Share[T]] = []
        for peer in to:
            settled_below = min((n for n, s in self._open.items() if s.to == peer), default=self._next)
            share = Share(Tag(self._incarnation, self._next), peer, part, content, settled_below)
            self._open[self._next] = share
            self._next += 1
            made.append(share)
        return made

    def delivered(self, share: Share[T]) -> bool:
        """The receiver took it. False if its fate was known before."""
        return self._open.pop(share.tag.number, None) is not None

    def came_back(self, share: Share[T]) -> bool:
        """It did not arrive and never will, or is given up: its weight waits here again. False if its fate was known.

        Whoever calls adds its content to the values that wait.
        """
        if self._open.pop(share.tag.number, None) is None:
            return False
        self.waiting += share.weight
        return True

    def arrived(self, weight: float) -> None:
        """A share of another peer was taken; its content was added to the values that wait."""
        self.waiting += weight
        self.arrivals += 1

    @property
    def full(self) -> bool:
        """Whether no more shares are taken before the next step."""
        return self.arrivals >= MAX_WAITING

    def absorb(self) -> int:
        """What waited is in the values now. Returns how many shares of others that were."""
        self.weight += self.waiting
        count, self.arrivals, self.waiting = self.arrivals, 0, 0.0
        return count


@dataclass(slots=True)
class _Account:
    """What one incarnation of a sender sent here."""

    at: float
    floor: int = 0
    fates: dict[int, bool] = field(default_factory=dict)


class Receipts:
    """What a receiver remembers of shares, so that each counts at most once and every answer about one is final.

    Memory is bounded: a share is forgotten when its sender says that it will not ask about it, or has not been heard of
    for `keep_s`, which must be longer than senders and the network hold on to a share.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._accounts: dict[tuple[PeerId, bytes], _Account] = {}

    def admits(self, sender: PeerId, tag: Tag, settled_below: int, now: float) -> bool:
        """Whether the share may still be taken. The sender asks about no lower number than `settled_below`."""
        account = self._account(sender, tag.incarnation, now)
        if account is None:
            return False
        if settled_below > account.floor:
            account.floor = settled_below
            account.fates = {n: taken for n, taken in account.fates.items() if n >= settled_below}
        return self._is_new(account, tag.number) and len(account.fates) < FATES_PER_SENDER

    def take(self, sender: PeerId, tag: Tag, now: float) -> bool:
        """The whole share is here. True exactly once, and only if nobody was told that it was not taken."""
        account = self._account(sender, tag.incarnation, now)
        if account is None or not self._is_new(account, tag.number) or len(account.fates) >= FATES_PER_SENDER:
            return False
        account.fates[tag.number] = True
        return True

    def fate(self, sender: PeerId, tag: Tag, now: float) -> bool | None:
        """Whether the share was taken. If not, it never will be. None: no answer can be promised now."""
        account = self._account(sender, tag.incarnation, now)
        if account is None or tag.number < account.floor:
            return None
        # Questions have room of their own: shares taken meanwhile must not leave an older one without an answer.
        if tag.number not in account.fates and len(account.fates) >= FATES_PER_SENDER + MAX_OPEN:
            return None
        return account.fates.setdefault(tag.number, False)

    @staticmethod
    def _is_new(account: _Account, number: int) -> bool:
        return number >= account.floor and number not in account.fates

    def _account(self, sender: PeerId, incarnation: bytes, now: float) -> _Account | None:
        """The sender's account, the last one used at the end; none if there is no room for one more."""
        key = (sender, incarnation)
        account = self._accounts.pop(key, None)
        if account is None:
            self._forget(now)
            own = sum(peer == sender for peer, _ in self._accounts)
            if own >= MAX_INCARNATIONS or len(self._accounts) >= MAX_SENDERS:
                return None
            account = _Account(now)
        account.at = now
        self._accounts[key] = account
        return account

    def idle(self, now: float) -> bool:
        """Whether nothing is remembered any more that somebody may ask about."""
        self._forget(now)
        return not self._accounts

    def _forget(self, now: float) -> None:
        while self._accounts:
            key = next(iter(self._accounts))
            if now - self._accounts[key].at <= self._keep_s:
                return
            del self._accounts[key]
