"""Membership over both transports: credentials in hello, the manifest service, peers that announce themselves."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import NoDonorError, SecurityError
from swarm.identity import KeyPair
from swarm.net.transport import Contact, Transport
from swarm.roles import Role
from swarm.runs.invite import Invite, owner_credential
from swarm.runs.manifest import Manifest
from swarm.runs.membership import CredentialAuthorizer, PeerAnnouncer, PeerState, list_peers
from swarm.runs.service import ManifestService, fetch_from_any, fetch_manifest, fetch_signed_manifest
from tests.support import World, deterministic_identity

RUN = deterministic_identity("the run")
OTHER_RUN = deterministic_identity("another run")


async def member(world: World, name: str, role: Role, run: KeyPair = RUN) -> Transport:
    """A started transport of a peer with a real credential."""
    identity, runtime = deterministic_identity(name), world.runtime(name)
    contact = Contact(identity.peer_id, ("127.0.0.1:1",))
    card = Invite.issue(run, [contact], [role], "7d", wall_s=runtime.clock.wall())
    judge = CredentialAuthorizer(run.public_key, card.credential(identity), identity, runtime.clock)
    return await world.transport(identity=identity, authorizer=judge, runtime=runtime)


def test_members_get_the_manifest_and_strangers_do_not(world: World) -> None:
    manifest = Manifest("m", RUN.public_key)

    async def main() -> None:
        owner = await member(world, "owner", Role.BOOTSTRAP)
        ManifestService(owner, manifest.sign(RUN), RUN.public_key)
        host = await member(world, "host", Role.HOST)
        assert await fetch_manifest(host, owner.contact, RUN.public_key) == manifest

        stranger = await member(world, "stranger", Role.HOST, OTHER_RUN)
        with pytest.raises(SecurityError):
            await fetch_manifest(stranger, owner.contact, RUN.public_key)
        assert await fetch_manifest(host, owner.contact, RUN.public_key) == manifest

    world.run(main)


def test_a_peer_with_somebody_elses_credential_is_refused(world: World) -> None:
    async def main() -> None:
        owner = await member(world, "owner", Role.BOOTSTRAP)
        ManifestService(owner, Manifest("m", RUN.public_key).sign(RUN), RUN.public_key)
        thief, runtime = deterministic_identity("thief"), world.runtime("thief")
        own = owner_credential(RUN, thief, [Role.MONITOR])
        judge = CredentialAuthorizer(RUN.public_key, own, thief, runtime.clock)
        stolen = owner_credential(RUN, deterministic_identity("victim"), [Role.BOOTSTRAP])
        judge._own = stolen
        transport = await world.transport(identity=thief, authorizer=judge, runtime=runtime)
        with pytest.raises(SecurityError):
            await transport.dial(owner.contact.addresses[0], owner.peer_id)

    world.run(main)


def test_the_newest_manifest_is_kept_and_served(world: World) -> None:
    async def main() -> None:
        owner, host = await member(world, "owner", Role.BOOTSTRAP), await member(world, "host", Role.HOST)
        service = ManifestService(owner, Manifest("m", RUN.public_key, (), 2).sign(RUN), RUN.public_key)
        newer = Manifest("m", RUN.public_key, (), 3).sign(RUN)
        assert service.offer(newer)
        assert not service.offer(newer)
        assert not service.offer(Manifest("m", RUN.public_key, (), 1).sign(RUN))
        with pytest.raises(SecurityError):
            service.offer(Manifest("m", OTHER_RUN.public_key, (), 9).sign(OTHER_RUN))
        assert service.signed == newer
        assert await fetch_signed_manifest(host, owner.contact, RUN.public_key) == newer

    world.run(main)


def test_a_manifest_is_taken_from_the_first_peer_that_gives_a_true_one(world: World) -> None:
    async def main() -> None:
        silent = await member(world, "silent", Role.BOOTSTRAP)
        liar = await member(world, "liar", Role.BOOTSTRAP)
        service = ManifestService(liar, Manifest("m", RUN.public_key).sign(RUN), RUN.public_key)
        service._signed = b"{}\n"
        honest = await member(world, "honest", Role.BOOTSTRAP)
        signed = Manifest("m", RUN.public_key).sign(RUN)
        ManifestService(honest, signed, RUN.public_key)
        host = await member(world, "host", Role.HOST)
        found = await fetch_from_any(host, [silent.contact, liar.contact, honest.contact], RUN.public_key)
        assert found == signed
        with pytest.raises(NoDonorError) as caught:
            await fetch_from_any(host, [silent.contact, liar.contact], RUN.public_key)
        assert silent.peer_id.short in caught.value.message
        assert liar.peer_id.short in caught.value.message

    world.run(main)


def test_peers_announce_themselves_and_withdraw(world: World) -> None:
    async def main() -> None:
        first = await world.endpoint()
        second = await world.endpoint(bootstrap=[first.contact])
        announcers = [PeerAnnouncer(first), PeerAnnouncer(second, lambda: {"step": 7, "loss": float("nan")})]
        for announcer in announcers:
            await announcer.start()
        await announcers[1].set_state(PeerState.ONLINE)

        seen = {record.peer_id: record for record in await list_peers(first.dht)}
        assert set(seen) == {first.peer_id, second.peer_id}
        assert seen[second.peer_id].state is PeerState.ONLINE
        assert seen[second.peer_id].metrics == {"step": 7.0}
        assert seen[second.peer_id].contact == second.contact
        assert seen[first.peer_id].state is PeerState.JOINING

        await announcers[1].close()
        await announcers[1].close()
        assert [record.peer_id for record in await list_peers(first.dht)] == [first.peer_id]
        await announcers[0].close()

    world.run(main)


def test_an_announced_peer_outlives_its_first_record_and_a_dead_one_does_not(memory_world: World) -> None:
    """Virtual time only: it spans many heartbeats."""

    async def main() -> None:
        first = await memory_world.endpoint()
        second = await memory_world.endpoint(bootstrap=[first.contact])
        announcer = PeerAnnouncer(second)
        await announcer.start()
        heartbeat = second.config.heartbeat_s
        await asyncio.sleep(10 * heartbeat)
        assert [r.peer_id for r in await list_peers(first.dht)] == [second.peer_id]
        await second.dht.close()
        await second.transport.close()
        await asyncio.sleep(4 * heartbeat)
        assert await list_peers(first.dht) == []

    memory_world.run(main)
