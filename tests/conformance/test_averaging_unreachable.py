"""Members that nobody can call, on both transports: they fetch what others are told, reduce nothing and lead nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.decisions import Terms
from swarm.averaging.declarations import declare
from swarm.averaging.gossip import Gossip, Strategy
from swarm.averaging.messages import join_request, seal_request
from swarm.averaging.rounds import Group, Seal, TooFew
from swarm.averaging.search import NO_REDUCER
from swarm.averaging.service import JOIN, POLL, AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import NoGroupError
from swarm.identity import KeyPair, PeerId
from swarm.net.transport import Contact
from swarm.pb import averaging_pb2 as pb
from tests.conformance.test_averaging import CONFIG, Mate, copies, mean_of, random_values, step_all
from tests.support import World

QUIET = CONFIG.model_copy(update={"averaging": CONFIG.averaging.model_copy(update={"sends_only": True})})


class Walls:
    """Peers behind walls: no call of averaging reaches them; who tries is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.behind: list[PeerId] = []
        self.tried: list[str] = []
        walls = self
        for name in ("_join", "_seal", "_commit", "_release", "_exchange", "_poll"):
            original = getattr(AveragingService, name)

            async def guarded(
                self: AveragingService, context: object, request: object, original: Any = original, name: str = name
            ) -> object:
                if self.endpoint.peer_id in walls.behind:
                    walls.tried.append(name)
                return await original(self, context, request)

            monkeypatch.setattr(AveragingService, name, guarded)
        contact = Endpoint.contact.fget  # type: ignore[attr-defined]

        def hidden(endpoint: Endpoint) -> Contact:
            return Contact(endpoint.peer_id, ()) if endpoint.peer_id in walls.behind else contact(endpoint)

        monkeypatch.setattr(Endpoint, "contact", property(hidden))

    async def mates(
        self,
        world: World,
        values: Sequence[Sequence[torch.Tensor]],
        hidden: Sequence[int],
        strategy: Strategy,
        how: str,
    ) -> list[Mate]:
        found: list[Mate] = []
        open_first = sorted(range(len(values)), key=lambda index: index in hidden)
        made: dict[int, Mate] = {}
        for index in open_first:
            behind = index in hidden
            config: PeerConfig = QUIET if behind and how == "configured" else CONFIG
            known = [found[0].endpoint.transport.contact] if found else []
            endpoint = await world.endpoint(bootstrap=known, config=config)
            if behind and how == "no address":
                self.behind.append(endpoint.peer_id)
            mate = Mate(endpoint, AveragingService(endpoint), None, list(values[index]))  # type: ignore[arg-type]
            mate.averager = Averager(mate, mate.tensors, "trunk", strategy)
            await mate.averager.open()
            world.at_close(mate.averager.aclose)
            found.append(mate)
            made[index] = mate
            if behind and endpoint.peer_id not in self.behind:
                self.behind.append(endpoint.peer_id)
        return [made[index] for index in range(len(values))]


@pytest.fixture
def walls(monkeypatch: pytest.MonkeyPatch) -> Walls:
    return Walls(monkeypatch)


@pytest.mark.parametrize("how", ["no address", "configured"])
@pytest.mark.parametrize("hidden", [(0,), (0, 2), (1, 2, 3)])
def test_groups_form_and_average_without_a_call_to_them(
    world: World, walls: Walls, hidden: tuple[int, ...], how: str
) -> None:
    async def main() -> None:
        values = random_values(4)
        group = await walls.mates(world, copies(values), hidden, AllReduce(), how)
        for _ in range(2):
            rounds = await step_all(group)
            assert [len(r.members) for r in rounds] == [4, 4, 4, 4]
            assert all(isinstance(r.outcome, Group) and r.degraded == () and r.others == () for r in rounds)
            assert max(r.seconds for r in rounds) < CONFIG.averaging.matchmaking_s
            assert PeerId.parse(rounds[0].members[0]) not in walls.behind
        for mate in group:
            for mine, exact in zip(mate.tensors, mean_of(values, [1.0] * 4), strict=True):
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)
            assert all(torch.equal(a, b) for a, b in zip(mate.tensors, group[0].tensors, strict=True))
        assert walls.tried == []

    world.run(main)


def test_nobody_waits_where_all_only_send(world: World, walls: Walls) -> None:
    async def main() -> None:
        group = await walls.mates(world, random_values(2), (0, 1), AllReduce(), "configured")
        rounds = await step_all(group)
        assert all(r.outcome == TooFew(1, 2, NO_REDUCER) for r in rounds)
        assert walls.tried == []

    world.run(main)


def test_they_pair_and_prepare_ahead_too(world: World, walls: Walls) -> None:
    async def main() -> None:
        values = random_values(2)
        group = await walls.mates(world, copies(values), (0,), Gossip(), "no address")
        for mate in group:
            assert await mate.averager.prepare_async(1.0, 0.3)
        await asyncio.sleep(0.3)
        rounds = await step_all(group)
        assert all(isinstance(r.outcome, Group) for r in rounds)
        assert torch.equal(group[0].tensors[0], group[1].tensors[0])
        assert walls.tried == []

    world.run(main)


def test_a_leader_that_dies_is_left_for_the_next(world: World, walls: Walls, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await walls.mates(world, copies(values), (0,), AllReduce(), "no address")
        first = await step_all(group)
        (leader,) = (m for m in group if str(m.endpoint.peer_id) == first[0].members[0])
        rest = [m for m in group if m is not leader]
        await leader.endpoint.transport.close(grace_s=0.0)
        rounds = await step_all(rest)
        assert [len(r.members) for r in rounds] == [2, 2]
        assert walls.tried == []

    world.run(main)


def test_polls_of_peers_that_did_not_ask_to_join_are_refused(world: World, walls: Walls) -> None:
    async def main() -> None:
        one, two = await walls.mates(world, random_values(2), (), AllReduce(), "no address")
        with pytest.raises(NoGroupError):
            await two.endpoint.transport.call(
                one.endpoint.contact, POLL, pb.PollGroupRequest(key="trunk"), timeout_s=2.0
            )

    world.run(main)


def test_a_seal_that_nobody_fetches_costs_the_leader_its_patience_only(world: World, walls: Walls) -> None:
    async def main() -> None:
        leader, stranger = await walls.mates(world, random_values(2), (1,), AllReduce(), "no address")
        looking = asyncio.create_task(leader.averager.step_async())
        await asyncio.sleep(0.1)
        terms = Terms(leader.averager.schema_hash, 1.0, 5, sends_only=True)
        request = join_request("trunk", declare(stranger.endpoint.identity, "trunk", (), terms), 2.0, 0)
        answer = await stranger.endpoint.transport.call(leader.endpoint.contact, JOIN, request, timeout_s=2.0)
        assert answer.verdict == pb.JoinGroupResponse.ACCEPTED
        result = await looking
        assert isinstance(result.outcome, TooFew)
        assert "the seal" in result.outcome.reason
        assert result.seconds <= 2 * CONFIG.averaging.matchmaking_s + 0.5
        assert walls.tried == []

    world.run(main)


def test_messages_are_given_again_until_seen_and_forgotten_for_a_new_search(world: World) -> None:
    from swarm.averaging.mail import Mailboxes

    identity = KeyPair.generate()
    peer = identity.peer_id
    member = declare(identity, "trunk", (), Terms(b"s" * 32, 1.0, 5, sends_only=True))
    seal = seal_request("trunk", Seal(b"n" * 16, b"s" * 32, (member,)))

    async def main() -> None:
        now = [0.0]
        mail = Mailboxes(lambda: now[0], kept_s=2.0)
        assert peer not in mail
        mail.open(peer, pulls=True, anew=True)
        offer = asyncio.create_task(mail.offer(peer, seal, 1.0))
        await asyncio.sleep(0)
        (first,) = await mail.collect(peer, pb.PollGroupRequest(), 0.01)
        (again,) = await mail.collect(peer, pb.PollGroupRequest(), 0.01)
        assert first == again
        assert first.seal == seal
        answered = pb.PollGroupRequest(seen=first.number, nonce=b"n" * 16, accepted=False, reason="no")
        assert await mail.collect(peer, answered, 0.01) == []
        assert await offer == (False, "no")
        mail.put(peer, pb.GroupMessage(commit=pb.CommitGroupRequest(nonce=b"n" * 16)))
        mail.open(peer, pulls=True, anew=False)
        assert len(await mail.collect(peer, pb.PollGroupRequest(), 0.01)) == 1
        mail.open(peer, pulls=True, anew=True)
        assert await mail.collect(peer, pb.PollGroupRequest(), 0.01) == []
        mail.put(peer, pb.GroupMessage(release=pb.ReleaseGroupRequest()))
        now[0] = 2.5
        assert await mail.collect(peer, pb.PollGroupRequest(), 0.01) == []
        mail.open(peer, pulls=False, anew=True)
        assert peer not in mail

    world.run(main)
