"""How a group comes together: a state machine without I/O that takes events and returns instructions.

The DHT only hints at who may take part. A peer asks others with a lower priority number, one at a time, to be admitted;
whoever has the lowest number among those looking leads. The leader seals the group (members, parts, schema hash,
nonce); the group exists once all of them accepted the seal. A peer has at most one accepted request, and only towards a
lower number, so that waiting is acyclic and nobody waits for ever; it accepts one seal at a time, and only its
leader's, so that nobody is in two groups.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from swarm.averaging.decisions import (
    AnswerJoin,
    AnswerSeal,
    AskFailed,
    AskJoin,
    Begin,
    Committed,
    Concluded,
    GiveUp,
    Hinted,
    Instruction,
    JoinAnswered,
    JoinAsked,
    MatchEvent,
    Nudge,
    OfferSeal,
    Released,
    SealAnswered,
    SealOffered,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Timing,
    Verdict,
)
from swarm.averaging.rounds import Alone, Group, Member, Mismatch, Outcome, Seal, TooFew
from swarm.identity import PeerId

MAX_GROUP = 256
MAX_NUDGES = 32
"""Peers with higher numbers that one search tells about itself."""


class Phase(Enum):
    IDLE = "idle"
    LOOKING = "looking"
    """Asking lower numbers, accepting higher ones."""
    FOLLOWING = "following"
    """A leader accepted us; its seal is to come."""
    PLEDGED = "pledged"
    """We accepted a seal; the leader's commit is to come."""
    SEALING = "sealing"
    """Our seal is out; answers are to come."""


def priority(key: str, peer: PeerId) -> bytes:
    """A peer's number under a key, uniform and fixed; lower leads."""
    return hashlib.sha256(key.encode() + b"\0" + peer.digest).digest()


@dataclass(slots=True)
class _Search:
    """What belongs to one attempt to find a group."""

    terms: Terms
    begun_at: float
    closes_at: float
    gives_up_at: float
    next_poll_at: float
    hinted: bool = False
    """Whether hints arrived during this search: only then do we know whom to expect."""
    queue: list[PeerId] = field(default_factory=list)
    nudged: dict[PeerId, None] = field(default_factory=dict)
    asking: PeerId | None = None
    asked_at: float = 0.0
    followers: dict[PeerId, Member] = field(default_factory=dict)
    failed: dict[PeerId, str] = field(default_factory=dict)
    mismatch: Mismatch | None = None
    leader: PeerId | None = None
    until: float = math.inf
    """When we stop waiting for the leader (FOLLOWING, PLEDGED) or for answers to our seal (SEALING)."""
    seal: Seal | None = None
    unanswered: dict[PeerId, None] = field(default_factory=dict)
    lost: str = ""


class Matchmaker:
    """Decides for one peer and one key. State changes only through `handle`.

    Args:
        key: The averaging key.
        me: This peer, without a part; `weight` is replaced by that of the terms.
        split: Divides a number of elements into parts for members with these weights.
        new_nonce: 16 unpredictable bytes.
        random_order: Ask lower numbers in random order (pairs mix better) instead of the lowest first.
    """

    def __init__(
        self,
        key: str,
        me: Member,
        timing: Timing,
        rng: random.Random,
        *,
        split: Callable[[int, int], list[int]],
        new_nonce: Callable[[], bytes],
        random_order: bool = False,
    ) -> None:
        self.key = key
        self.me = me
        self.timing = timing
        self.phase = Phase.IDLE
        self._rng = rng
        self._split = split
        self._new_nonce = new_nonce
        self._random_order = random_order
        self._number = priority(key, me.peer_id)
        self._hinted: dict[PeerId, None] = {}
        self._absent: dict[PeerId, None] = {}
        self._waiting: dict[PeerId, float] = {}
        self._search: _Search | None = None

    @property
    def wake_at(self) -> float:
        """When the next `Tick` is due."""
        search = self._search
        if search is None:
            return math.inf
        if self.phase is not Phase.LOOKING:
            return search.until
        if search.asking is None:
            return min(search.closes_at, search.next_poll_at)
        full = len(search.followers) + 1 >= search.terms.max_group
        patience = min(self.timing.poll_s, self.timing.answer_s) if full else self.timing.answer_s
        return min(search.closes_at, search.asked_at + patience)

    @property
    def terms(self) -> Terms | None:
        """What we bring to the round that is being formed, if one is."""
        return self._search.terms if self._search else None

    @property
    def closes_at(self) -> float:
        """When the window closes; in the past if we are not looking."""
        return self._search.closes_at if self._search else -math.inf

    @property
    def pledged_nonce(self) -> bytes | None:
        """The nonce of the seal that we accepted and that is not committed yet."""
        return self._search.seal.nonce if self.phase is Phase.PLEDGED and self._search and self._search.seal else None

    def others_waiting(self, now: float) -> bool:
        """Whether somebody asked us for a round while we were not looking, and still is."""
        self._waiting = {peer: until for peer, until in self._waiting.items() if until > now}
        return bool(self._waiting)

    def handle(self, event: MatchEvent, now: float) -> list[Instruction]:
        """Take an event and return what to do, in order. `now` never falls."""
        match event:
            case Begin(terms, window_s):
                return self._begin(terms, min(window_s, self.timing.window_s), now)
            case Hinted(peers):
                known, self._hinted = self._hinted, {peer: None for peer in peers if peer != self.me.peer_id}
                if self._search is not None:
                    self._search.hinted = True
                    if any(peer not in known for peer in self._hinted):
                        self._search.next_poll_at = now
                return self._nudge() + self._advance(now)
            case JoinAsked():
                answer = self._asked(event, now)
                return [answer, *self._advance(now)]
            case JoinAnswered():
                return self._answered(event, now) + self._advance(now)
            case AskFailed(peer, reason):
                if self._search is not None:
                    self._search.failed[peer] = reason
                    if self._search.asking == peer:
                        self._search.asking = None
                return self._advance(now)
            case SealOffered(leader, seal):
                return self._offered(leader, seal, now)
            case SealAnswered(peer, nonce, accepted, reason):
                return self._seal_answered(peer, nonce, accepted, reason, now)
            case Committed(nonce):
                if self._search is not None and self.pledged_nonce == nonce:
                    return [self._conclude_group(self._search)]
                return []
            case Released(peer, redirect):
                return self._released(peer, redirect, now)
            case GiveUp(reason):
                return self._give_up(reason)
            case Tick():
                return self._tick(now)

    def _begin(self, terms: Terms, window: float, now: float) -> list[Instruction]:
        assert self._search is None, "one search at a time"
        self.phase = Phase.LOOKING
        self._waiting.clear()
        self._search = _Search(terms, now, now + window, now + 2 * window, now)
        return self._advance(now)

    # Looking ---------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Instruction]:
        search = self._search
        if search is None or self.phase is not Phase.LOOKING:
            return []
        if self._complete(search, now):
            return self._send_seal(search, now)
        if now >= search.closes_at:
            self._absent = {p: None for p in self._hinted if p not in search.followers}
            if len(search.followers) + 1 >= search.terms.min_group:
                return self._send_seal(search, now)
            return self._conclude_without(search)
        if now >= search.begun_at + self.timing.settle_s and not search.followers and search.asking is None:
            reachable = [p for p in self._hinted if p not in search.failed]
            if not reachable and search.mismatch is None:
                return self._conclude_without(search)
        return self._ask_next(search, now)

    def _complete(self, search: _Search, now: float) -> bool:
        size = len(search.followers) + 1
        if size < search.terms.min_group:
            return False
        if size >= search.terms.max_group:
            return search.asking is None or now >= search.asked_at + self.timing.poll_s
        skipped = (search.followers, search.failed, self._absent)
        return search.hinted and search.asking is None and all(any(peer in s for s in skipped) for peer in self._hinted)

    def _ask_next(self, search: _Search, now: float) -> list[Instruction]:
        if search.asking is not None:
            return []
        if not search.queue and now >= search.next_poll_at:
            search.next_poll_at = now + self.timing.poll_s * (0.75 + 0.5 * self._rng.random())
            lower = sorted((p for p in self._hinted if priority(self.key, p) < self._number), key=self._order)
            search.queue = [p for p in lower if p not in search.failed]
            if self._random_order:
                self._rng.shuffle(search.queue)
        if not search.queue:
            return []
        search.asking, search.asked_at = search.queue.pop(0), now
        return [AskJoin(search.asking)]

    def _nudge(self) -> list[Instruction]:
        """Tell those that could follow us that we look: else a peer between two rounds would not know."""
        search = self._search
        if search is None or self.phase is not Phase.LOOKING:
            return []
        new = [p for p in self._hinted if priority(self.key, p) > self._number and p not in search.nudged]
        new = [p for p in new if p not in search.followers][: MAX_NUDGES - len(search.nudged)]
        search.nudged.update(dict.fromkeys(new))
        return [Nudge(peer) for peer in new]

    def _order(self, peer: PeerId) -> bytes:
        return priority(self.key, peer)

    def _asked(self, event: JoinAsked, now: float) -> AnswerJoin:
        peer, search = event.member.peer_id, self._search
        self._absent.pop(peer, None)
        if search is None:
            if len(self._waiting) < MAX_GROUP:
                self._waiting[peer] = now + min(event.patience_s, self.timing.window_s)
            return AnswerJoin(Verdict.NOT_LOOKING)
        if priority(self.key, peer) <= self._number:
            # It nudges us: it looks, so it may be asked at once.
            self._hinted.setdefault(peer)
            search.next_poll_at = now
            return AnswerJoin(Verdict.WRONG_WAY)
        if event.schema_hash != search.terms.schema_hash:
            search.mismatch = self._mismatch(peer, event.schema_hash, search)
            search.failed[peer] = "other schema"
            return AnswerJoin(Verdict.MISMATCH, schema_hash=search.terms.schema_hash)
        if self.phase is Phase.SEALING:
            return AnswerJoin(Verdict.BUSY)
        if self.phase is not Phase.LOOKING:
            return AnswerJoin(Verdict.REDIRECT, leader=search.leader)
        if peer not in search.followers and len(search.followers) + 1 >= search.terms.max_group:
            return AnswerJoin(Verdict.FULL)
        if now >= search.closes_at:
            return AnswerJoin(Verdict.BUSY)
        search.failed.pop(peer, None)
        search.followers[peer] = event.member
        return AnswerJoin(Verdict.ACCEPTED, seal_within_s=search.closes_at - now + self.timing.answer_s)

    def _answered(self, event: JoinAnswered, now: float) -> list[Instruction]:
        search = self._search
        if search is None or self.phase is not Phase.LOOKING or search.asking != event.peer:
            # Too late: we lead, follow or are done, so the accept must not stand.
            ours = search is not None and self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and search.leader == event.peer
            return [SendRelease(event.peer)] if event.verdict is Verdict.ACCEPTED and not ours else []
        search.asking = None
        match event.verdict:
            case Verdict.ACCEPTED:
                patience = min(max(event.seal_within_s, 0.0), self.timing.window_s + self.timing.answer_s)
                search.until = min(now + patience + self.timing.answer_s, search.gives_up_at)
                return self._follow(search, event.peer)
            case Verdict.MISMATCH:
                search.mismatch = self._mismatch(event.peer, event.schema_hash, search)
                search.failed[event.peer] = "other schema"
            case Verdict.REDIRECT if event.leader is not None:
                self._prefer(search, event.leader)
            case Verdict.WRONG_WAY:
                search.failed[event.peer] = "disagrees about who leads"
        return []

    def _prefer(self, search: _Search, peer: PeerId) -> None:
        """Ask this peer next, if it may be asked at all and was not asked in this sweep already."""
        eligible = peer not in search.failed and peer != self.me.peer_id and priority(self.key, peer) < self._number
        if eligible and peer not in search.queue[:1]:
            search.queue = [peer, *(p for p in search.queue if p != peer)]

    # Following -------------------------------------------------------------------------------------------------------

    def _follow(self, search: _Search, leader: PeerId) -> list[Instruction]:
        released: list[Instruction] = [SendRelease(peer, leader) for peer in search.followers]
        search.followers.clear()
        self.phase, search.leader, search.asking = Phase.FOLLOWING, leader, None
        return released

    def _offered(self, leader: PeerId, seal: Seal, now: float) -> list[Instruction]:
        search = self._search
        # A seal may overtake the answer to our request; it then says that we were accepted.
        overtook = search is not None and self.phase is Phase.LOOKING and search.asking == leader
        follows = search is not None and self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and search.leader == leader
        if search is None or not (overtook or follows):
            return [AnswerSeal(False, "we do not follow this leader")]
        problem = self._problem(search, leader, seal)
        if problem:
            return [AnswerSeal(False, problem)]
        released = self._follow(search, leader) if overtook else []
        self.phase, search.seal = Phase.PLEDGED, seal
        search.until = now + 2 * self.timing.answer_s
        return [AnswerSeal(True), *released]

    def _problem(self, search: _Search, leader: PeerId, seal: Seal) -> str:
        ids = [member.peer_id for member in seal.members]
        mine = [member for member in seal.members if member.peer_id == self.me.peer_id]
        if len(ids) > MAX_GROUP or len(dict.fromkeys(ids)) != len(ids) or len(seal.nonce) != 16:
            return "the seal is malformed"
        if len(mine) != 1 or leader not in ids:
            return "the seal names neither us nor its leader"
        if seal.schema_hash != search.terms.schema_hash:
            return "the seal is for another schema"
        if sum(member.part for member in seal.members) != search.terms.numel:
            return "the parts do not cover the vector"
        if (
            any(not math.isfinite(m.weight) or m.weight < 0 for m in seal.members)
            or mine[0].weight != search.terms.weight
        ):
            return "the weights are wrong"
        return ""

    def _released(self, peer: PeerId, redirect: PeerId | None, now: float) -> list[Instruction]:
        search = self._search
        if search is None:
            return []
        if self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and search.leader == peer:
            return self._look_again(search, redirect, now, "the leader dissolved the group")
        if self.phase is Phase.LOOKING and search.asking == peer:
            # The release overtook the accept that it takes back.
            search.asking = None
            if redirect is not None:
                self._prefer(search, redirect)
            return self._advance(now)
        if peer in search.followers:
            if self.phase is Phase.SEALING and search.seal is not None:
                return self._seal_answered(peer, search.seal.nonce, False, "it left", now)
            del search.followers[peer]
        return []

    def _look_again(self, search: _Search, redirect: PeerId | None, now: float, reason: str) -> list[Instruction]:
        search.lost, search.leader, search.seal, search.until = reason, None, None, math.inf
        self.phase = Phase.LOOKING
        # Time spent on a leader that went must not leave us without a chance, within twice the window.
        search.closes_at = min(max(search.closes_at, now + self.timing.answer_s), search.gives_up_at)
        search.queue.clear()
        search.next_poll_at = now
        if redirect is not None:
            self._prefer(search, redirect)
        return self._advance(now)

    # Sealing ---------------------------------------------------------------------------------------------------------

    def _send_seal(self, search: _Search, now: float) -> list[Instruction]:
        me = replace(self.me, weight=search.terms.weight)
        members = [me, *(search.followers[p] for p in sorted(search.followers, key=self._order))]
        parts = self._split(search.terms.numel, len(members))
        sealed = tuple(replace(m, part=part) for m, part in zip(members, parts, strict=True))
        search.seal = Seal(self._new_nonce(), search.terms.schema_hash, sealed)
        search.unanswered = dict.fromkeys(search.followers)
        search.until = now + self.timing.answer_s
        self.phase = Phase.SEALING
        return [OfferSeal(search.seal)]

    def _seal_answered(self, peer: PeerId, nonce: bytes, accepted: bool, reason: str, now: float) -> list[Instruction]:
        search = self._search
        if search is None or self.phase is not Phase.SEALING or search.seal is None or search.seal.nonce != nonce:
            return []
        search.unanswered.pop(peer, None)
        if not accepted and search.followers.pop(peer, None) is not None:
            search.failed[peer] = search.lost = f"{peer.short} did not accept the seal: {reason}"
        return [] if search.unanswered else self._seal_done(search, now)

    def _seal_done(self, search: _Search, now: float) -> list[Instruction]:
        assert search.seal is not None
        if len(search.followers) + 1 == len(search.seal.members):
            seal = search.seal
            return [SendCommit(seal), self._conclude_group(search)]
        if len(search.followers) + 1 >= search.terms.min_group and now < search.gives_up_at:
            return self._send_seal(search, now)
        search.seal, search.until = None, math.inf
        self.phase = Phase.LOOKING
        return self._advance(now)

    # Ends ------------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Instruction]:
        search = self._search
        if search is None:
            return []
        if self.phase is Phase.LOOKING:
            if search.asking is not None and now >= search.asked_at + self.timing.answer_s:
                search.failed[search.asking] = "no answer"
                search.asking = None
            return self._advance(now)
        if now < search.until:
            return []
        if self.phase is Phase.SEALING:
            for peer in list(search.unanswered):
                search.followers.pop(peer, None)
                search.failed[peer] = search.lost = f"{peer.short} did not answer the seal"
            search.unanswered.clear()
            return self._seal_done(search, now)
        assert search.leader is not None
        silent = search.leader
        search.failed[silent] = "silent"
        release: list[Instruction] = [SendRelease(silent)]
        return release + self._look_again(search, None, now, f"leader {silent.short} fell silent")

    def _give_up(self, reason: str) -> list[Instruction]:
        search = self._search
        if search is None:
            return []
        search.lost = reason
        return self._conclude_without(search)

    def _conclude_group(self, search: _Search) -> Concluded:
        assert search.seal is not None
        self.phase, self._search = Phase.IDLE, None
        return Concluded(Group(search.seal.nonce.hex()), search.seal)

    def _conclude_without(self, search: _Search) -> list[Instruction]:
        released: list[Instruction] = [SendRelease(peer) for peer in search.followers]
        if self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and search.leader is not None:
            released.append(SendRelease(search.leader))
        outcome: Outcome
        if search.mismatch is not None:
            outcome = search.mismatch
        elif not self._hinted and not search.followers and not search.lost:
            outcome = Alone()
        else:
            reason = search.lost or "; ".join(f"{p.short}: {r}" for p, r in list(search.failed.items())[:4])
            outcome = TooFew(len(search.followers) + 1, search.terms.min_group, reason or "others were not looking")
        self.phase, self._search = Phase.IDLE, None
        return [*released, Concluded(outcome)]

    def _mismatch(self, peer: PeerId, theirs: bytes, search: _Search) -> Mismatch:
        return Mismatch(str(peer), search.terms.schema_hash.hex(), theirs.hex())
