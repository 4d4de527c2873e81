"""`swarm create` and `swarm join` around a peer that is not real: arguments in, lines and exit codes out.

The commands with real peers are tested in tests/e2e/test_cli.py.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.errors import BootstrapError, PortInUseError
from swarm.events import EventStream
from swarm.identity import KeyPair
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.runs.invite import Invite
from swarm.runs.manifest import Manifest

RUN_KEY = KeyPair.from_private_bytes(b"\x01" * 32)
PEER_KEY = KeyPair.from_private_bytes(b"\x02" * 32)
CONTACT = Contact(PEER_KEY.peer_id, ("127.0.0.1:4242",))
RUN_TOML = 'name = "my-lm"\npreset = "local"\n[[experts]]\ngrid = "ffn.[0:2]"\nmodule = "ffn"\nconfig = { hid = 8 }\n'


class FakePeer:
    """Looks like a peer; presses Ctrl-C when its state is shown the second time."""

    def __init__(self, events: EventStream, roles: frozenset[Role]) -> None:
        self.events, self.roles = events, roles
        self.manifest = Manifest("my-lm", RUN_KEY.public_key)
        self.run_id, self.peer_id, self.contact, self.name = self.manifest.run_id, PEER_KEY.peer_id, CONTACT, "lab-7"
        self.transport = SimpleNamespace(stats=SimpleNamespace(sent_bytes=1500, received_bytes=2_500_000))
        self.dht = SimpleNamespace(peers=lambda: [CONTACT])
        self.host = SimpleNamespace(held={"ffn.0": 1, "ffn.1": 4}) if Role.HOST in roles else None
        self.shown, self.closed, self.membership_ended = 0, 0, False

    @property
    def condition(self) -> Any:
        from swarm.runs.membership import PeerState

        self.shown += 1
        if self.shown == 2:
            signal.raise_signal(signal.SIGINT)
        return PeerState.ONLINE

    def close(self) -> None:
        self.closed += 1


class FakeRun:
    def __init__(self, peer: FakePeer) -> None:
        self.bootstrap, self.manifest, self.run_id = peer, peer.manifest, peer.run_id
        self.ticket = Invite.issue(RUN_KEY, [CONTACT], [Role.HOST]).ticket.encode()

    def invite(self, role: Role, expires: str | None) -> str:
        return Invite.issue(RUN_KEY, [CONTACT], [role], expires).encode()

    def close(self) -> None:
        self.bootstrap.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The arguments that `create_run` and `join` got; both answer with fakes."""
    made: list[dict[str, Any]] = []

    def create_run(name: str, experts: Any, **arguments: Any) -> FakeRun:
        peer = FakePeer(arguments["events"], frozenset(arguments["roles"]))
        made.append({"name": name, "experts": experts, "peer": peer, **arguments})
        return FakeRun(peer)

    def join(invite: str, **arguments: Any) -> FakePeer:
        from swarm.runs.membership import PeerState, PeerStateChanged

        peer = FakePeer(arguments["events"], frozenset({arguments["role"]}))
        made.append({"invite": invite, "peer": peer, **arguments})
        peer.events.emit(PeerStateChanged(PeerState.SYNCING.value))
        peer.events.emit(PeerStateChanged(PeerState.ONLINE.value))
        return peer

    fake = ModuleType("swarm.run")
    fake.create_run, fake.join = create_run, join  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swarm.run", fake)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    return made


def invoke(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


def invite_for(*roles: Role) -> str:
    return Invite.issue(RUN_KEY, [CONTACT], roles, "7d").encode()


def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML, "utf-8")
    return str(path)


def test_create_tells_ticket_and_invites_then_leaves(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    result = invoke("create", run_file(tmp_path), "--port", "4242", "--expires", "12h")
    assert result.exit_code == 0
    call = calls[0]
    assert (call["name"], call["roles"]) == ("my-lm", [Role.BOOTSTRAP])
    assert call["config"].transport.port == 4242
    assert call["config"].transport.listen_host == "127.0.0.1"
    assert call["data_dir"] == tmp_path / "home" / "owner" / "my-lm"
    for word in (
        "Ticket",
        "swarmt1",
        "swarm join swarmi1",
        "# host",
        "# trainer",
        "valid for 12h",
        "LEAVING",
        "Left my-lm",
    ):
        assert word in result.output
    assert call["peer"].closed


def test_create_as_json(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    result = invoke(
        "create", run_file(tmp_path), "--role", "host", "--data-dir", str(folder), "--expires", "never", "--json"
    )
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.output.splitlines()]
    created = next(line for line in lines if line["kind"] == "created")
    assert set(created["invites"]) == {"host", "trainer", "bootstrap", "monitor"}
    assert Invite.decode(created["invites"]["trainer"], wall_s=1e13).roles == (Role.TRAINER,)
    assert created["data_dir"] == str(folder)
    assert calls[0]["roles"] == [Role.BOOTSTRAP, Role.HOST]
    assert [line["kind"] for line in lines if line["kind"] != "status"] == ["state", "created", "state", "left"]
    status = next(line for line in lines if line["kind"] == "status")
    assert (status["experts"], status["peers"], status["state"]) == (2, 1, "ONLINE")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--role", "trainer"], 2, "cannot play the role trainer"),
        (["--expires", "soon"], 2, "not a duration"),
        (["--announce", "nowhere"], 2, "is not an address"),
        (["--port", "70000"], 2, "65535"),
        (["--profile", "missing.toml"], 2, "cannot be read"),
    ],
)
def test_create_refuses_arguments(
    calls: list[dict[str, Any]], tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    result = invoke("create", run_file(tmp_path), *arguments)
    assert result.exit_code == code
    assert says in result.output
    assert "Traceback" not in result.output
    assert calls == []


def test_create_without_a_file(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    result = invoke("create", str(tmp_path / "missing.toml"), "--json")
    assert result.exit_code == 2
    assert json.loads(result.output)["error"]["name"] == "ConfigError"


def test_join_hosts_and_leaves(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    text = invite_for(Role.HOST)
    result = invoke("join", text, "--preset", "local", "--device", "cpu", "--max-experts", "3", "--name", "lab-7")
    assert result.exit_code == 0
    call = calls[0]
    assert (call["invite"], call["role"]) == (text, Role.HOST)
    assert (call["config"].host.device, call["config"].host.max_experts, call["config"].name) == ("cpu", 3, "lab-7")
    assert call["config"].data_dir.parent == tmp_path / "home" / "runs"
    order = [
        "No remote code runs here",
        "JOINING",
        "SYNCING",
        "ONLINE",
        "Joined my-lm as lab-7",
        "2 experts",
        "LEAVING",
    ]
    positions = [result.output.index(word) for word in order]
    assert positions == sorted(positions)
    assert "1 peer ·" in result.output
    assert call["peer"].closed
    assert not (call["config"].data_dir / "in-use").exists()


def test_join_reads_the_invite_from_standard_input(calls: list[dict[str, Any]]) -> None:
    text = invite_for(Role.MONITOR)
    result = invoke("join", "-", "--json", stdin=text + "\n")
    assert result.exit_code == 0
    assert calls[0]["invite"].strip() == text
    kinds = [json.loads(line)["kind"] for line in result.output.splitlines()]
    assert [kind for kind in kinds if kind != "status"] == ["notice", *["state"] * 3, "joined", "state", "left"]


def test_join_writes_events_to_a_file(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert invoke("join", invite_for(Role.HOST), "--log-file", str(log)).exit_code == 0
    assert [json.loads(line)["state"] for line in log.read_text().splitlines()] == ["SYNCING", "ONLINE"]


@pytest.mark.parametrize(
    ("roles", "arguments", "code", "says"),
    [
        ([Role.HOST], ["--role", "monitor"], 2, "as host, not as monitor"),
        ([Role.TRAINER], [], 2, "your training script"),
        ([Role.HOST], ["--preset", "moon"], 2, "no preset"),
        ([Role.HOST], ["--import", "no_such_module_anywhere"], 2, "no_such_module_anywhere"),
        ([Role.HOST], ["--log-file", "/no/such/folder/x"], 2, "log file"),
    ],
)
def test_join_refuses_arguments(
    calls: list[dict[str, Any]], roles: list[Role], arguments: list[str], code: int, says: str
) -> None:
    result = invoke("join", invite_for(*roles), *arguments)
    assert result.exit_code == code
    assert says in result.output
    assert "Traceback" not in result.output
    assert calls == []


@pytest.mark.parametrize("text", ["garbage", "swarmi1abc", invite_for(Role.HOST)[:-9], "swarmi9abc"])
def test_join_refuses_bad_invites(calls: list[dict[str, Any]], text: str) -> None:
    result = invoke("join", text)
    assert result.exit_code == 4
    assert "[E3004]" in result.output
    assert "Fix:" in result.output
    assert calls == []


def test_join_refuses_an_expired_invite(calls: list[dict[str, Any]]) -> None:
    old = Invite.issue(RUN_KEY, [CONTACT], [Role.HOST], "30m", wall_s=1000.0).encode()
    result = invoke("join", old, "--json")
    assert result.exit_code == 4
    assert json.loads(result.output)["error"]["name"] == "ExpiredInviteError"


@pytest.mark.parametrize(
    ("error", "code"),
    [(BootstrapError("Nobody answers.", reasons={"a:1": "refused"}), 3), (PortInUseError("Port 1 is taken."), 3)],
)
def test_a_failed_start_is_one_sentence(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["swarm.run"], "join", fail)
    result = invoke("join", invite_for(Role.HOST))
    assert result.exit_code == code
    assert str(error) in result.output


def test_ctrl_c_while_joining_aborts(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["swarm.run"], "join", interrupted)
    result = invoke("join", invite_for(Role.HOST))
    assert result.exit_code == 130
    assert result.output.endswith("swarm: aborted\n")
