import pytest

from swarm.observe.report import PeerView, SwarmView
from swarm.roles import Role


def view() -> SwarmView:
    return SwarmView(
        peers=(
            PeerView("a", "host-0", frozenset({Role.HOST}), "ONLINE"),
            PeerView("b", "host-1", frozenset({Role.HOST, Role.TRAINER}), "SYNCING"),
            PeerView("c", "trainer-0", frozenset({Role.TRAINER}), "ONLINE"),
        ),
        holders={"ffn": {"ffn.0": ("a", "b"), "ffn.1": ("b",), "ffn.2": ("a", "b")}, "empty": {"empty.0": ()}},
    )


def test_replicas_are_counted_for_every_expert_of_the_grid() -> None:
    assert view().replicas("ffn") == {"ffn.0": 2, "ffn.1": 1, "ffn.2": 2}
    assert view().min_replicas("ffn") == 1
    assert view().min_replicas("empty") == 0


def test_live_fraction_counts_experts_that_anybody_holds() -> None:
    assert view().live_fraction("ffn") == 1.0
    assert view().live_fraction("empty") == 0.0
    assert view().without(["b"]).live_fraction("ffn") == pytest.approx(2 / 3)


def test_unknown_grid_is_an_error_not_zero_replicas() -> None:
    with pytest.raises(KeyError):
        view().min_replicas("typo")


def test_peers_by_role_state_and_name() -> None:
    assert [p.name for p in view().by_role("host")] == ["host-0", "host-1"]
    assert [p.name for p in view().by_role(Role.TRAINER)] == ["host-1", "trainer-0"]
    assert [p.name for p in view().by_state("ONLINE")] == ["host-0", "trainer-0"]
    found = view().peer("trainer-0")
    assert found is not None
    assert found.peer_id == "c"
    assert view().peer("nobody") is None


def test_without_removes_a_dead_peer_and_its_replicas() -> None:
    rest = view().without(["b"])
    assert [p.peer_id for p in rest.peers] == ["a", "c"]
    assert rest.replicas("ffn") == {"ffn.0": 1, "ffn.1": 0, "ffn.2": 1}
