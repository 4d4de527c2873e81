"""The ends of a peer's life that no protocol test reaches: closing it from wrong places, and data directories."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarm
from swarm.errors import ConfigError, LoopThreadError
from swarm.net.addresses import split_address
from swarm.net.loop import loop_thread
from tests.support import eventually


@pytest.fixture
def run() -> Iterator[swarm.Run]:
    with swarm.create_run("the-run") as run:
        yield run


def listens(peer: swarm.Peer) -> bool:
    with socket.socket() as client:
        return client.connect_ex(split_address(peer.contact.addresses[0])) == 0


def test_closing_on_the_loop_thread_is_refused_and_can_be_done_elsewhere(run: swarm.Run) -> None:
    peer = run.peer("monitor")

    async def close() -> None:
        peer.close()

    with pytest.raises(LoopThreadError):
        loop_thread().run(close())
    assert not peer.closed
    assert listens(peer)
    peer.close()
    assert peer.closed
    assert not listens(peer)


def test_a_leave_that_is_cut_short_stops_the_peer_all_the_same(run: swarm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = run.peer("monitor")
    begun = asyncio.Event()

    async def hang(_: object) -> None:
        begun.set()
        await asyncio.sleep(1e4)

    async def cut_short() -> None:
        leaving = asyncio.ensure_future(peer._close(drain=True))
        await begun.wait()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        await eventually(lambda: not listens(peer))

    monkeypatch.setattr(peer._announcer, "set_state", hang)
    loop_thread().run(cut_short(), 20.0)
    peer.close()
    assert peer.closed


@pytest.mark.parametrize("inside", [True, False])
def test_a_data_directory_that_cannot_be_used_is_named(run: swarm.Run, tmp_path: Path, inside: bool) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    folder = file / "inside" if inside else file
    with pytest.raises(ConfigError, match="file"):
        swarm.join(run.invite("monitor"), data_dir=folder)
    with pytest.raises(ConfigError, match="file"):
        swarm.create_run("another", data_dir=folder)
