"""The exception tree: stable unique codes, exit codes by branch, the round trip over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

import swarm.errors as errors
from swarm.errors import RemoteFailureError, SwarmError, error_from_wire

CLASSES = [c for c in errors._all_classes(SwarmError) if c.__module__ == "swarm.errors"]
BRANCHES = [c for c in SwarmError.__subclasses__() if c.__module__ == "swarm.errors"]

STABLE_CODES = {
    1: "SwarmError",
    1000: "UsageError",
    1001: "ConfigError",
    2000: "NetworkError",
    2001: "PeerUnreachableError",
    2002: "BootstrapError",
    2003: "CallTimeoutError",
    3000: "SecurityError",
    3001: "IdentityMismatchError",
    3002: "WrongRunError",
    3003: "BadSignatureError",
    3004: "InvalidInviteError",
    3005: "ExpiredInviteError",
    3006: "AdmissionRefusedError",
    3007: "UnknownSessionError",
    3008: "NotAuthorizedError",
    4000: "WireError",
    4001: "MalformedFrameError",
    5000: "DhtError",
    6000: "ExpertError",
    6004: "NotEnoughExpertsError",
    7000: "AveragingError",
    8000: "StateError",
    8002: "CorruptStateError",
    9000: "ProcessError",
}


def test_codes_are_unique() -> None:
    codes = [c.code for c in CLASSES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(("code", "name"), STABLE_CODES.items())
def test_codes_are_stable(code: int, name: str) -> None:
    assert getattr(errors, name).code == code


def test_every_branch_has_its_own_exit_code_and_its_members_share_it() -> None:
    assert sorted(b.exit_code for b in BRANCHES) == list(range(2, 11))
    for branch in BRANCHES:
        for cls in errors._all_classes(branch):
            assert cls.exit_code == branch.exit_code
            assert cls.code // 1000 == branch.code // 1000


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_says_what_it_means(cls: type[SwarmError]) -> None:
    assert cls.__doc__
    assert cls.__doc__.strip().split("\n")[0].endswith(".")
    assert cls.__name__.endswith("Error")


def test_the_written_form_has_code_cause_and_fix() -> None:
    error = errors.ConfigError("The port is negative.", fix="Use 0 to 65535.")
    assert str(error) == "[E1001] The port is negative. Fix: Use 0 to 65535."
    assert str(errors.ConfigError("It says: no", fix="Ask.")) == "[E1001] It says: no. Fix: Ask."
    assert str(errors.ConfigError("Bad.")) == "[E1001] Bad."


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_the_wire(cls: type[SwarmError]) -> None:
    sent = cls("It broke.", fix="Mend it.")
    got = error_from_wire(json.loads(json.dumps(sent.to_wire())), remote="abcdefghij")
    assert type(got) is cls
    assert (got.message, got.fix, got.remote) == ("It broke.", "Mend it.", "abcdefghij")
    assert "(from peer abcdefgh)" in str(got)


@pytest.mark.parametrize(
    "fields", [{}, {"code": "3004"}, {"code": 999_999}, {"code": None, "message": 7}, {"code": [1]}, {"code": 2.5}]
)
def test_malformed_or_unknown_errors_become_a_remote_failure(fields: dict[str, Any]) -> None:
    assert type(error_from_wire(fields, remote="x")) is RemoteFailureError


def test_what_travels_is_bounded() -> None:
    fields = errors.ConfigError("m" * 10_000, fix="f" * 10_000).to_wire()
    assert len(fields["message"]) == len(fields["fix"]) == 500
    assert len(error_from_wire({"code": 1001, "message": "m" * 10_000}, remote="x").message) == 500


def test_ambiguity_says_whether_the_other_side_may_have_acted() -> None:
    ambiguous = {c.__name__ for c in CLASSES if c.ambiguous}
    assert {"CallTimeoutError", "ConnectionLostError", "RemoteFailureError"} <= ambiguous
    assert not errors.PeerUnreachableError.ambiguous
    assert not errors.HostBusyError.ambiguous


def test_bootstrap_errors_keep_a_reason_for_each_address() -> None:
    error = errors.BootstrapError("Nobody answers.", reasons={"a:1": "refused"})
    assert error.reasons == {"a:1": "refused"}
    assert errors.BootstrapError("Nobody answers.").reasons == {}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for branch in BRANCHES:
        line = next(line for line in errors.__doc__.splitlines() if branch.__name__ in line)
        assert f"{branch.code // 1000}xxx" in line
        assert f" {branch.exit_code} " in line
