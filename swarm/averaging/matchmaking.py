"""How a group comes together: a state machine without I/O that takes events and returns instructions.

The DHT only hints at who may take part. A peer asks others with a lower priority number, one at a time, to be admitted;
whoever has the lowest number among those looking leads. The leader seals the group (members, parts, schema hash,
nonce); the group exists once all of them accepted the seal. A peer has at most one accepted request, and only towards a
lower number, so that waiting is acyclic and nobody waits for ever; it accepts one seal at a time, and only its
leader's, so that nobody is in two groups. Those that only send count as higher than all others: they lead nobody.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from swarm.averaging.admission import admit
from swarm.averaging.decisions import (
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
    SealSpoilt,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Timing,
    Verdict,
)
from swarm.averaging.rounds import Group, Member, Seal
from swarm.averaging.seals import compose, objection, portioned
from swarm.averaging.search import WRONG_WAY, Phase, Search
from swarm.averaging.view import View
from swarm.identity import PeerId

NOT_OURS = "we do not follow this leader"


class Matchmaker:
    """Decides for one peer and one key. State changes only through `handle`.

    Args:
        key: The averaging key.
        me: This peer, without a part; what the terms say replaces what it says.
        new_nonce: 16 unpredictable bytes.
        random_order, partner: In which order peers are asked; see `View`.
        barred: What a peer is on probation for; empty if it is not. It is neither asked nor admitted.
    """

    def __init__(
        self,
        key: str,
        me: Member,
        timing: Timing,
        rng: random.Random,
        *,
        new_nonce: Callable[[], bytes],
        random_order: bool = False,
        partner: Callable[[Sequence[PeerId]], PeerId | None] | None = None,
        barred: Callable[[PeerId], str] = lambda _: "",
    ) -> None:
        self.me = me
        self.timing = timing
        self.phase = Phase.IDLE
        self._rng = rng
        self._new_nonce = new_nonce
        self._view = View(key, me.peer_id, rng, barred, random_order, partner)
        self._search: Search | None = None

    @property
    def wake_at(self) -> float:
        """When the next `Tick` is due."""
        return self._search.wake_at(self.phase, self.timing) if self._search else math.inf

    @property
    def cell(self) -> str:
        """The cell of the current search, or the last one."""
        return self._view.cell

    @property
    def terms(self) -> Terms | None:
        """What we bring to the round that is being formed, if one is."""
        return self._search.terms if self._search else None

    @property
    def leader(self) -> PeerId | None:
        """Whom we follow."""
        return self._search.leader if self._search else None

    def follows_us(self, peer: PeerId) -> bool:
        """Whether we accepted a peer into the group that we form."""
        return self._search is not None and peer in self._search.followers

    def expects_seal(self, leader: PeerId) -> bool:
        """Whether a seal of this peer would be looked at: we follow it, or asked it, for a seal may overtake its answer
        to our request and then says that we were accepted."""
        if self.phase is Phase.LOOKING:
            return self._search is not None and self._search.asking == leader
        return self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and self.leader == leader

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
        return self._view.others_waiting(now)

    def handle(self, event: MatchEvent, now: float) -> list[Instruction]:
        """Take an event and return what to do, in order. `now` never falls."""
        match event:
            case Begin():
                return self._begin(event, now)
            case Hinted(peers, pulls):
                news = self._view.hint(peers, pulls)
                if self._search is not None:
                    self._search.hinted = True
                    if news:
                        self._search.next_poll_at = now
                return self._advance(now) + self._nudge()
            case JoinAsked():
                answer = admit(event, self.me.peer_id, self._search, self.phase, self._view, self.timing, now)
                return [answer, *self._advance(now)]
            case JoinAnswered():
                return self._answered(event, now) + self._advance(now)
            case AskFailed(peer, reason):
                return self._ask_failed(peer, reason, now) + self._advance(now)
            case SealOffered(leader, seal):
                return self._offered(leader, seal, now)
            case SealAnswered(peer, nonce, accepted, reason):
                return self._seal_answered(peer, nonce, accepted, reason, now)
            case Committed(nonce):
                pledged = self._search if self.pledged_nonce == nonce else None
                return [self._conclude_group(pledged)] if pledged else []
            case SealSpoilt(leader, reason):
                spoilt = self._search if self.expects_seal(leader) else None
                return self._leave(spoilt, leader, reason, now) if spoilt is not None else []
            case Released(peer, redirect):
                return self._released(peer, redirect, now)
            case GiveUp(reason):
                if self._search is None:
                    return []
                self._search.lost = reason
                return self._conclude_without(self._search)
            case Tick():
                return self._tick(now)

    def _begin(self, begin: Begin, now: float) -> list[Instruction]:
        assert self._search is None, "one search at a time"
        window = min(begin.window_s, self.timing.window_s)
        search = self._search = Search(begin.terms, now, now + window, now + 2 * window, now, hinted=begin.warm)
        self.phase = Phase.LOOKING
        self._view.begin(search, now)
        return self._advance(now) + self._nudge()

    # Looking ---------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Instruction]:
        search = self._search
        if search is None or self.phase is not Phase.LOOKING:
            return []
        if self._complete(search, now):
            return self._send_seal(search, now)
        if now >= search.closes_at:
            self._view.missed(search)
            return self._send_seal(search, now) if search.sealable else self._conclude_without(search)
        idle = search.settled(now, self.timing) and not search.followers and search.asking is None
        if idle and search.mismatch is None and not self._view.leaders(search):
            return self._conclude_without(search)
        return self._ask_next(search, now)

    def _complete(self, search: Search, now: float) -> bool:
        if not search.sealable:
            return False
        if search.full:
            return search.asking is None or now >= search.asked_at + self.timing.patience_when_full_s
        return search.asking is None and self._view.complete(search, settled=search.settled(now, self.timing))

    def _ask_next(self, search: Search, now: float) -> list[Instruction]:
        if search.asking is not None:
            return []
        if not search.queue and now >= search.next_poll_at:
            search.next_poll_at = now + self.timing.poll_s * (0.75 + 0.5 * self._rng.random())
            search.queue = self._view.sweep(search, search.settled(now, self.timing))
        if not search.queue:
            return []
        search.asking, search.asked_at = search.queue.pop(0), now
        return [AskJoin(search.asking)]

    def _nudge(self) -> list[Instruction]:
        """Tell those that could follow us that we look: else a peer between two rounds would not know."""
        looking = self._search if self.phase is Phase.LOOKING else None
        return [Nudge(peer) for peer in self._view.nudges(looking)] if looking else []

    def _answered(self, event: JoinAnswered, now: float) -> list[Instruction]:
        search, peer = self._search, event.peer
        if search is None:
            return [SendRelease(peer)] if event.verdict is Verdict.ACCEPTED else []
        follows = self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and search.leader == peer
        if event.verdict is Verdict.MISMATCH and not follows:
            search.other_schema(peer, event.schema_hash)
        elif event.verdict is Verdict.PROBATION and not follows:
            search.failed[peer] = f"refuses us: {event.reason}"
        if search.asking != peer or self.phase not in (Phase.LOOKING, Phase.FOLLOWING):
            # Too late: we lead, follow another or are pledged, so the accept must not stand.
            return [SendRelease(peer)] if event.verdict is Verdict.ACCEPTED and not follows else []
        search.asking = None
        match event.verdict:
            case Verdict.ACCEPTED:
                patience = min(max(event.seal_within_s, 0.0), self.timing.window_s + self.timing.answer_s)
                search.until = min(now + patience + self.timing.answer_s, search.gives_up_at)
                search.check_at, search.doubts = now + self.timing.check_s, 0
                return [] if follows else self._follow(search, peer)
            case _ if follows:
                return self._look_again(search, event.leader, now, f"leader {peer.short} went")
            case Verdict.REDIRECT if event.leader is not None:
                self._view.prefer(search, event.leader)
            case Verdict.WRONG_WAY:
                search.failed[peer] = WRONG_WAY
        return []

    def _ask_failed(self, peer: PeerId, reason: str, now: float) -> list[Instruction]:
        search = self._search
        if search is None:
            return []
        if self.phase is Phase.FOLLOWING and search.leader == peer:
            if search.asking == peer:
                return self._doubt(search, peer, reason, now)
            return []
        search.failed[peer] = reason
        if search.asking == peer:
            search.asking = None
        return []

    # Following -------------------------------------------------------------------------------------------------------

    def _follow(self, search: Search, leader: PeerId) -> list[Instruction]:
        self.phase = Phase.FOLLOWING
        return [SendRelease(peer, leader) for peer in search.follow(leader)]

    def _doubt(self, search: Search, leader: PeerId, reason: str, now: float) -> list[Instruction]:
        """Our leader did not answer. Once may be an accident."""
        search.asking = None
        search.doubts += 1
        if search.doubts < 2:
            search.check_at = now
            return []
        search.failed[leader] = reason
        return [SendRelease(leader), *self._look_again(search, None, now, f"leader {leader.short} fell silent")]

    def _offered(self, leader: PeerId, seal: Seal, now: float) -> list[Instruction]:
        search = self._search
        if search is None or not self.expects_seal(leader):
            return [AnswerSeal(False, NOT_OURS)]
        overtook = self.phase is Phase.LOOKING
        if wrong := objection(seal, leader, self.me, search.terms, self._view.order):
            answer = AnswerSeal(False, wrong.reason, wrong.offence)
            return [answer, *(self._leave(search, leader, wrong.reason, now) if wrong.offence else [])]
        released = self._follow(search, leader) if overtook else []
        self.phase, search.seal, search.asking = Phase.PLEDGED, portioned(seal, search.terms.numel), None
        search.until = min(now + 2 * self.timing.answer_s, search.gives_up_at)
        return [AnswerSeal(True), *released]

    def _leave(self, search: Search, leader: PeerId, reason: str, now: float) -> list[Instruction]:
        """Have no more to do with this leader in this search."""
        search.failed[leader] = reason
        left = self._look_again(search, None, now, f"leader {leader.short} sealed what cannot be: {reason}")
        return [SendRelease(leader), *left]

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
                self._view.prefer(search, redirect)
            return self._advance(now)
        if peer in search.followers:
            if self.phase is Phase.SEALING and search.seal is not None:
                return self._seal_answered(peer, search.seal.nonce, False, "it left", now)
            del search.followers[peer]
        return []

    def _look_again(self, search: Search, redirect: PeerId | None, now: float, reason: str) -> list[Instruction]:
        self.phase = Phase.LOOKING
        search.unfollow(now, reason, self.timing.answer_s)
        if redirect is not None:
            self._view.prefer(search, redirect)
        return self._advance(now)

    # Sealing ---------------------------------------------------------------------------------------------------------

    def _send_seal(self, search: Search, now: float) -> list[Instruction]:
        followers = [search.followers[p] for p in sorted(search.followers, key=self._view.order)]
        search.seal = compose(self._new_nonce(), self.me, search.terms, search.begun_at, followers, now)
        search.unanswered = dict.fromkeys(search.followers)
        search.until = min(now + self.timing.answer_s, search.gives_up_at)
        self.phase = Phase.SEALING
        return [OfferSeal(search.seal)]

    def _seal_answered(self, peer: PeerId, nonce: bytes, accepted: bool, reason: str, now: float) -> list[Instruction]:
        search = self._search
        if search is None or self.phase is not Phase.SEALING or search.seal is None or search.seal.nonce != nonce:
            return []
        search.unanswered.pop(peer, None)
        dropped = [] if accepted else self._drop(search, peer, f"did not accept the seal: {reason}")
        return dropped if search.unanswered else dropped + self._seal_done(search, now)

    def _drop(self, search: Search, peer: PeerId, reason: str) -> list[Instruction]:
        """Go on without a follower; it is told, for it may have accepted and its answer been lost."""
        if search.followers.pop(peer, None) is None:
            return []
        search.failed[peer] = search.lost = f"{peer.short} {reason}"
        return [SendRelease(peer)]

    def _seal_done(self, search: Search, now: float) -> list[Instruction]:
        assert search.seal is not None
        if search.size == len(search.seal.members):
            seal = search.seal
            return [SendCommit(seal), self._conclude_group(search)]
        if search.sealable and now < search.gives_up_at:
            return self._send_seal(search, now)
        search.seal, search.until = None, math.inf
        self.phase = Phase.LOOKING
        return self._advance(now)

    # Ends ------------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Instruction]:
        search = self._search
        if search is None:
            return []
        overdue = search.asking is not None and now >= search.asked_at + self.timing.answer_s
        if self.phase is Phase.LOOKING:
            if overdue and search.asking is not None:
                search.failed[search.asking] = "no answer"
                search.asking = None
            return self._advance(now)
        if self.phase is Phase.SEALING:
            if now < search.until:
                return []
            silent = [self._drop(search, peer, "did not answer the seal") for peer in list(search.unanswered)]
            search.unanswered.clear()
            return [*(instruction for drop in silent for instruction in drop), *self._seal_done(search, now)]
        leader = search.leader
        assert leader is not None
        if now >= search.until:
            search.failed[leader] = "silent"
            return [SendRelease(leader), *self._look_again(search, None, now, f"leader {leader.short} fell silent")]
        if self.phase is Phase.FOLLOWING and overdue:
            return self._doubt(search, leader, "no answer", now)
        if self.phase is Phase.FOLLOWING and search.asking is None and now >= search.check_at:
            search.asking, search.asked_at = leader, now
            return [AskJoin(leader)]
        return []

    def _conclude_group(self, search: Search) -> Concluded:
        assert search.seal is not None
        self.phase, self._search = Phase.IDLE, None
        return Concluded(Group(search.seal.nonce.hex()), search.seal)

    def _conclude_without(self, search: Search) -> list[Instruction]:
        outcome = search.outcome(bool(self._view.hinted or search.heard), self._view.leaders(search))
        released: list[Instruction] = [SendRelease(peer) for peer in search.followers]
        if self.phase in (Phase.FOLLOWING, Phase.PLEDGED) and search.leader is not None:
            released.append(SendRelease(search.leader))
        self.phase, self._search = Phase.IDLE, None
        return [*released, Concluded(outcome)]
