"""`swarm dht` around a network that is not real: arguments in, lines and exit codes out.

The commands in a real run are tested in tests/e2e/test_cli.py.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import swarm.cli.dht as cli
from swarm.cli.main import app
from swarm.dht.known import FILE_NAME, write_known
from swarm.dht.records import Entry
from swarm.errors import BootstrapError
from swarm.identity import KeyPair
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.runs.credentials import Credential, run_id_of
from swarm.runs.invite import Invite, Ticket
from swarm.runs.membership import peer_key

RUN_KEY = KeyPair.from_private_bytes(b"\x01" * 32)
PEER = KeyPair.from_private_bytes(b"\x02" * 32).peer_id
CONTACT = Contact(PEER, ("127.0.0.1:4242",))
TICKET = Ticket(RUN_KEY.public_key, (CONTACT,)).encode()
ODD = {"bytes": b"\x00\xff", "inf": float("inf"), 3: ["\x1b[2J"], "long": "x" * 500}
PEER_BODY = {
    "name": "lab\x1b-7",
    "roles": ["host"],
    "addresses": ["10.1.2.3:4\x1b"],
    "state": "ONLINE",
    "metrics": {"loss": 2.5},
}


class FakeDht:
    """Answers from a table."""

    entries: dict[str, list[Entry]] = {  # noqa: RUF012 - read only
        "k": [Entry(PEER, "", 1, 7, 12.3456), Entry(PEER, "s\n", ODD, 8, 5.0)],
        peer_key(PEER): [Entry(PEER, "", PEER_BODY, 9, 20.0)],
    }

    async def get(self, key: str, *, fresh: bool) -> list[Entry]:
        return self.entries.get(key, [])

    async def get_many(self, keys: list[str], *, fresh: bool, max_age_s: float) -> dict[str, list[Entry]]:
        return {key: self.entries.get(key, []) for key in keys}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How the commands would have entered the run."""
    entered: list[Any] = []

    async def visit(way: Any, work: Callable[[Any], Awaitable[Any]], timeout_s: float) -> Any:
        entered.append((way, timeout_s))
        return await work(FakeDht())

    monkeypatch.setattr(cli, "_visit", visit)
    return entered


def invoke(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, ["dht", *arguments], input=stdin, catch_exceptions=False)


def invite_for(*roles: Role) -> str:
    return Invite.issue(RUN_KEY, [CONTACT], roles, "7d").encode()


def owner_folder(tmp_path: Path) -> Path:
    RUN_KEY.save(tmp_path / "owner" / "run_key.pem")
    return tmp_path / "owner"


def roles_of(way: Any) -> tuple[Role, ...]:
    return Credential.verify(way.credential.encoded, RUN_KEY.public_key).roles


def test_get_shows_author_subkey_version_lifetime_and_body(ways: list[Any]) -> None:
    result = invoke("get", "k", invite_for(Role.MONITOR, Role.HOST), "--timeout", "3")
    assert result.exit_code == 0
    first, second, last = result.output.splitlines()
    assert first == f"{PEER.short}  version 7  ttl 12 s  1"
    assert second.startswith(f'{PEER.short}  subkey "s\\n"  version 8  ttl 5 s  {{"bytes": {{"hex": "00ff"}}')
    assert "\x1b" not in result.output
    assert "--json shows all" in second
    assert last == '2 entries under "k".'
    way, timeout_s = ways[0]
    assert (roles_of(way), timeout_s, way.remembered) == ((Role.MONITOR,), 3.0, [])
    assert way.addresses == [("127.0.0.1:4242", PEER)]


def test_get_as_json_has_everything(ways: list[Any]) -> None:
    result = invoke("get", "k", "-", "--json", stdin=invite_for(Role.TRAINER) + "\n")
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [line["kind"] for line in lines] == ["entry", "entry", "done"]
    assert lines[0] == {
        "kind": "entry", "key": "k", "author": str(PEER), "subkey": "", "record_version": 7, "ttl_s": 12.346, "body": 1,
    }  # fmt: skip
    assert lines[1]["body"] == {"bytes": {"hex": "00ff"}, "inf": "inf", "3": ["\x1b[2J"], "long": "x" * 500}
    assert roles_of(ways[0][0]) == (Role.TRAINER,)


def test_a_key_without_entries_is_no_error(ways: list[Any]) -> None:
    result = invoke("get", "nothing", invite_for(Role.HOST))
    assert (result.exit_code, result.output) == (0, 'Nothing is published under "nothing".\n')


def test_peers(ways: list[Any]) -> None:
    result = invoke("peers", invite_for(Role.HOST))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"{PEER.short}  lab-7  host  ONLINE  10.1.2.3:4\\u001b  ttl 20 s",
        "1 peer.",
    ]
    lines = [json.loads(line) for line in invoke("peers", invite_for(Role.HOST), "--json").output.splitlines()]
    assert lines[0]["peer_id"] == str(PEER)
    assert lines[0]["metrics"] == {"loss": 2.5}
    assert lines[1] == {"kind": "done", "peers": 1}


def test_the_owners_folder_admits_with_a_ticket_or_with_what_it_remembers(ways: list[Any], tmp_path: Path) -> None:
    folder = owner_folder(tmp_path)
    assert invoke("get", "k", TICKET, "--data-dir", str(folder)).exit_code == 0
    (folder / FILE_NAME).write_bytes(b"damaged")
    assert invoke("get", "k", TICKET, "--data-dir", str(folder)).exit_code == 0
    damaged = invoke("get", "k", "--data-dir", str(folder))
    assert (damaged.exit_code, "cannot be used" in damaged.output) == (2, True)
    write_known(folder / FILE_NAME, run_id_of(RUN_KEY.public_key), [CONTACT])
    assert invoke("get", "k", "--data-dir", str(folder)).exit_code == 0
    assert [(way.addresses, way.remembered) for way, _ in ways] == [
        ([("127.0.0.1:4242", PEER)], []),
        ([("127.0.0.1:4242", PEER)], []),
        ([], [CONTACT]),
    ]
    assert {roles_of(way) for way, _ in ways} == {(Role.MONITOR,)}
    assert len({way.identity.peer_id for way, _ in ways}) == 3  # nobody is displaced


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["get", "k"], 2, "admits you"),
        (["peers", TICKET], 2, "A ticket shows"),
        (["get", "k", "garbage"], 4, "neither a ticket"),
        (["get"], 2, "KEY"),
        (["get", "k", TICKET, "--timeout", "0"], 2, "0.1"),
        (["dance"], 2, "dance"),
    ],
)
def test_arguments_that_do_not_do(ways: list[Any], arguments: list[str], code: int, says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert says in result.output
    assert "Traceback" not in result.output
    assert ways == []


def test_folders_that_do_not_do(ways: list[Any], tmp_path: Path) -> None:
    folder = owner_folder(tmp_path)
    alone = invoke("get", "k", "--data-dir", str(folder))
    assert (alone.exit_code, "Nobody of the run is known" in alone.output) == (2, True)
    other = Ticket(KeyPair.generate().public_key, (CONTACT,)).encode()
    foreign = invoke("get", "k", other, "--data-dir", str(folder))
    assert (foreign.exit_code, "E3002" in foreign.output) == (4, True)
    assert not (tmp_path / "none").exists()
    assert invoke("get", "k", "--data-dir", str(tmp_path / "none")).exit_code == 2
    assert not (tmp_path / "none").exists()
    assert ways == []


def test_an_error_is_one_sentence_and_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async def visit(*_: Any) -> None:
        raise BootstrapError("Nobody answers.", reasons={"a:1": "refused", "b:2": "silent"}, remembered=("b:2",))

    monkeypatch.setattr(cli, "_visit", visit)
    result = invoke("peers", invite_for(Role.HOST), "--json")
    assert result.exit_code == 3
    error = json.loads(result.output)["error"]
    assert (error["name"], error["reasons"], error["remembered"]) == (
        "BootstrapError",
        {"a:1": "refused", "b:2": "silent"},
        ["b:2"],
    )
