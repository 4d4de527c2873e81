"""Reads a `SwarmView` from the DHT."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError
from swarm.experts.records import HostRecord, merge_records, record_key
from swarm.experts.spec import ExpertGrid
from swarm.observe.report import PeerView, SwarmView
from swarm.runs.membership import list_peers


async def read_view(endpoint: Endpoint, grids: Iterable[ExpertGrid]) -> SwarmView:
    """What the DHT lists at this moment; malformed records are left out. Run it on the endpoint's loop.

    Raises:
        DhtError, NetworkError: The DHT could not be read.
    """
    peers = tuple(
        PeerView(str(r.peer_id), r.name, r.roles, r.state.value, dict(r.metrics))
        for r in await list_peers(endpoint.dht)
    )
    holders: dict[str, dict[str, tuple[str, ...]]] = {}
    wanted = list(grids)
    found = await endpoint.dht.get_many([record_key(grid.name) for grid in wanted], fresh=True)
    for grid in wanted:
        records = []
        for entry in found[record_key(grid.name)]:
            try:
                records.append(HostRecord.from_body(entry.author, entry.body))
            except MalformedFrameError:
                continue
        hosts = merge_records(records)
        holders[grid.name] = {uid: tuple(str(h.peer_id) for h in hosts if uid in h.experts) for uid in grid.uids()}
    return SwarmView(peers=peers, holders=holders)
