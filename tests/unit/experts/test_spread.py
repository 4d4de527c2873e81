"""Which experts of a grid too large for its hosts live."""

from __future__ import annotations

from swarm.experts.placement import Placement, Take
from swarm.experts.records import HostRecord
from swarm.experts.spec import ExpertGrid, parse_uid
from swarm.experts.spread import Order, Spread
from swarm.identity import PeerId
from tests.support import deterministic_identity

HUGE = ExpertGrid("ffn.[0:64].[0:64].[0:64]", "ffn", replicas=2)
SMALL = ExpertGrid("small.[0:4]", "ffn", replicas=2)


def peer(i: int) -> PeerId:
    return deterministic_identity(f"host {i}").peer_id


def test_an_order_names_every_expert_once_and_begins_alike() -> None:
    grid = ExpertGrid("ffn.[0:3].[0:5]", "ffn")
    assert sorted(Order(grid).first(99)) == sorted(grid.uids())
    order = Order(HUGE)
    assert order.first(10) == order.first(100)[:10] == Order(HUGE).first(10)


def test_as_many_live_as_there_is_room_for_spread_over_the_grid() -> None:
    spread = Spread([HUGE, SMALL], above=1024)
    others = [HostRecord(peer(i), (), capacity=10) for i in range(1, 100)]
    wanted = spread.replicas(10, {}, others)
    assert len(wanted) == 4 + (1000 - 8) // 2
    assert all(uid in wanted for uid in SMALL.uids())
    for dimension in range(3):
        used = {parse_uid(uid)[1][dimension] for uid in wanted if uid in HUGE}
        assert len(used) == 64, "no corner of the grid is left out"
    alone = spread.replicas(10, {}, [])
    assert len(alone) == 4 + 2
    assert set(alone) <= set(wanted), "what lived before goes on"


def test_what_is_held_or_kept_lives_on_although_hosts_left() -> None:
    spread = Spread([HUGE], above=1024)
    late = Order(HUGE).first(500)
    record = HostRecord(peer(1), (), {late[400]: 3}, capacity=1, kept={late[450]: 2, "other.1": 1})
    wanted = spread.replicas(1, {late[499]: 0, "ffn.64.0.0": 1}, [record])
    assert set(wanted) == {late[0], late[400], late[450], late[499]}


def test_hosts_fill_up_with_different_experts_and_then_rest() -> None:
    """Ten hosts with room for ten each: fifty experts with two replicas."""
    spreads = [Spread([HUGE], 1024) for _ in range(10)]
    hosts = [Placement(peer(i), {}, 10) for i in range(10)]
    held: list[dict[str, int]] = [{} for _ in hosts]

    def tick() -> int:
        records = [HostRecord(peer(i), (), dict(h), capacity=10, load=len(h)) for i, h in enumerate(held)]
        actions = 0
        for i, host in enumerate(hosts):
            others = records[:i] + records[i + 1 :]
            host.replicas = spreads[i].replicas(10, held[i], others)
            for action in host.decide(records[i].experts, others):
                assert isinstance(action, Take)
                held[i][action.uid] = 0
                actions += 1
        return actions

    for _ in range(12):
        tick()
    count: dict[str, int] = {}
    for h in held:
        for uid in h:
            count[uid] = count.get(uid, 0) + 1
    assert count == dict.fromkeys(Order(HUGE).first(50), 2)
    assert tick() == 0
