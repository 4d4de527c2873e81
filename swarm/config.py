"""Settings of a peer, grouped by the part that reads them, with presets for where a run lives.

`PeerConfig.preset("wan")` is the default; `lan` and `local` shorten every patience. Durations end in `_s`, sizes in
`_bytes`. Every field is documented where it is declared.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
HEADER_SHARE = 16
"""A frame's header of at most this fraction of a message travels with the first payload, on top of it."""
PresetName = Literal["local", "lan", "wan"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeadlineConfig(_Section):
    """Bounds of adaptive deadlines (see `swarm.net.deadlines`)."""

    initial_s: float = Field(10.0, gt=0)
    """Deadline of a call whose peer and method have too few samples."""
    floor_s: float = Field(0.5, gt=0)
    """No deadline is shorter."""
    cap_s: float = Field(60.0, gt=0)
    """No deadline is longer."""


class TransportConfig(_Section):
    """Listening, limits and pacing of the transport."""

    listen_host: str = "0.0.0.0"
    """Interface to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    announce: tuple[str, ...] = ()
    """`host:port` addresses to tell others instead of the detected ones."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Patience for a connection with TLS handshake and hello."""
    session_idle_s: float = Field(900.0, gt=0)
    """A session that is not used for this long ends."""
    max_control_bytes: int = Field(1 * MIB, gt=0)
    """Largest control message accepted."""
    max_stream_chunk_bytes: int = Field(4 * MIB, gt=0)
    """Largest single message of a bulk stream accepted."""
    chunk_bytes: int = Field(1 * MIB, gt=0)
    """Size of the messages that we cut bulk streams into."""
    max_calls_per_s: float = Field(2000.0, gt=0)
    """Calls per second accepted from one peer id, with a burst of twice that."""
    max_channels: int = Field(256, gt=0)
    """Connections kept open; the least recently used is closed first."""
    bulk_connections: int = Field(1, ge=1)
    """Connections per peer for bulk streams; more help on long fat links."""
    max_upload_bytes_s: float | None = Field(None, gt=0)
    """Upload limit, or none."""

    @model_validator(mode="after")
    def _messages_fit(self) -> Self:
        if self.chunk_bytes + self.chunk_bytes // HEADER_SHARE > self.max_stream_chunk_bytes:
            raise ValueError("chunk_bytes, and a sixteenth more for a header, must fit into max_stream_chunk_bytes")
        return self


class DhtConfig(_Section):
    """Kademlia parameters and record lifetimes."""

    bucket_size: int = Field(20, gt=0)
    """Peers per routing-table bucket (Kademlia's k)."""
    parallelism: int = Field(3, gt=0)
    """Requests in flight per lookup (Kademlia's alpha)."""
    replication: int = Field(5, gt=0)
    """Nearest peers that hold a record."""
    call_timeout_s: float = Field(5.0, gt=0)
    """Cap of one DHT call."""
    republish_fraction: float = Field(0.4, gt=0, lt=1)
    """Authors renew a record after this fraction of its TTL."""
    max_body_bytes: int = Field(4 * KIB, gt=0)
    """Largest record body."""
    max_entries: int = Field(100_000, gt=0)
    """Records held in total."""
    max_entries_per_author: int = Field(4096, gt=0)
    """Records held of one author."""
    max_entries_per_key: int = Field(4096, gt=0)
    """Entries held of one key."""
    max_entries_per_key_and_author: int = Field(1024, gt=0)
    """Entries held of one author under one key."""
    max_total_bytes: int = Field(256 * MIB, gt=0)
    """Memory that all held records may take, with what Python adds to them."""
    max_work_per_s: float = Field(500.0, gt=0)
    """Work accepted from one peer id a second, with bursts of 20 s worth: a call is 1, a record 1, a target 0.25."""
    max_version_floors: int = Field(100_000, gt=0)
    """Versions remembered of records that have expired, so that old ones cannot be replayed."""
    maintenance_s: float = Field(30.0, gt=0)
    """Interval of bucket refresh, expiry and hand-over."""
    cache_keys: int = Field(4096, gt=0)
    """Keys whose entries are kept for readers who take an older answer (`max_age_s`)."""
    cache_absent_keys: int = Field(4096, gt=0)
    """Keys kept as having no entries, for the same readers."""
    cache_bytes: int = Field(16 * MIB, gt=0)
    """Size of all entries kept so."""
    watch_min_s: float = Field(1.0, gt=0)
    """Shortest interval at which a watched key is read again, used after a change."""
    watch_max_s: float = Field(15.0, gt=0)
    """Longest interval at which a watched key is read again, reached while nothing changes."""
    known_peers: int = Field(256, gt=0)
    """Peers remembered to return to after they were lost; a quarter of them is kept on disk."""

    @model_validator(mode="after")
    def _watching_slows_down(self) -> Self:
        if self.watch_min_s > self.watch_max_s:
            raise ValueError("watch_min_s must not exceed watch_max_s")
        return self


class HostConfig(_Section):
    """Expert hosting."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:0`, or `auto` for CUDA where there is one."""
    max_experts: int | None = Field(None, ge=0)
    """Most experts to hold; none lets memory decide."""
    autocast: Literal["none", "bf16"] = "none"
    """`bf16` runs forward passes under torch's autocast: faster where the device has units for it, at its precision.
    Weights, gradients and optimizer steps keep their dtypes."""
    compile: bool = False
    """Run experts through torch.compile; one that it cannot compile runs without."""
    max_gradient_norm_ratio: float | None = Field(10.0, gt=1)
    """A trainer's gradients are scaled down to so many times the median over the trainers of an expert; none trusts
    every trainer. See `swarm.experts.limits.GradientLimits`."""
    max_batch_tokens: int = Field(8192, gt=0)
    """Token budget of one batched computation."""
    max_queued_tokens: int = Field(65536, gt=0)
    """Tokens that may wait; more are refused with `HostBusyError`. One caller may have as much waiting as is still
    free: half of it alone."""
    max_inflight_bytes: int = Field(1024 * MIB, gt=0)
    """Tensors of requests that arrive or are not answered yet; more are refused with `HostBusyError`. A host without
    any takes one request of any size; beside others, one caller may have half of it."""
    upload_stall_s: float = Field(10.0, gt=0)
    """A request of which nothing arrives for so long is given up."""
    upload_bytes_s: int = Field(64 * 1024, gt=0)
    """So is one that arrives more slowly than this."""
    forward_cache_bytes: int = Field(512 * MIB, gt=0)
    """Inputs kept for backward passes that may come."""
    announce_ttl_s: float = Field(30.0, gt=0)
    """Lifetime of the record that lists the held experts."""
    announce_prefixes_above: int = Field(1024, ge=0)
    """Grids with more experts are announced by prefix too, for clients that search them; well below what clients read
    whole (`client.directory_max_experts`), which peers may set differently."""
    replica_sync_s: float = Field(10.0, gt=0)
    """Interval at which a secondary replica copies the primary."""
    placement_s: float = Field(3.0, gt=0)
    """Interval at which a host looks for experts that too few hosts hold."""
    drain_timeout_s: float = Field(10.0, ge=0)
    """Patience of a leaving host for others to take its experts over."""
    checkpoint_s: float = Field(300.0, gt=0)
    """Interval at which experts that have changed are saved below `data_dir`; a host without one saves nothing."""
    checkpoints_kept: int = Field(2, ge=1)
    """Checkpoints of one expert on disk; more than one, so that a damaged file costs one interval."""
    max_checkpoint_bytes: int = Field(64 * 1024 * MIB, ge=0)
    """Disk space for the checkpoints of all experts of a run together."""


class ClientConfig(_Section):
    """Calls to remote experts."""

    directory_refresh_s: float = Field(3.0, gt=0)
    """Interval at which the expert directory is refreshed in the background."""
    directory_max_experts: int = Field(4096, ge=0)
    """Grids with more experts are not read whole but searched. Hosts must announce what such a search reads, see
    `host.announce_prefixes_above`."""
    beam_width: int = Field(256, gt=0)
    """Prefixes of experts in the beam of one token when a grid is searched."""
    search_cache_prefixes: int = Field(16384, gt=0)
    """Prefixes of one grid whose records are kept."""
    deadline: DeadlineConfig = DeadlineConfig(floor_s=2.0)
    """Of one attempt at one host. The floor is generous: giving up on a host that computes loses its update, while one
    that stalls costs it only once, because it is avoided from then on."""


class AveragingConfig(_Section):
    """Group forming and averaging rounds."""

    matchmaking_s: float = Field(10.0, gt=0)
    """Window in which a group forms."""
    round_timeout_s: float = Field(60.0, gt=0)
    """Budget of one round after its group is sealed."""
    chunk_timeout_s: float = Field(10.0, gt=0)
    """Cap of the patience for a member's next chunk. It is learned from the time its chunks take, down to half of this;
    then the group goes on without that chunk."""
    chunk_bytes: int = Field(2 * MIB, gt=0)
    """Largest message of an exchange; equal for all peers that average together, and at most what they accept."""
    share_reclaim_s: float = Field(120.0, gt=0)
    """Push-sum: a share comes back when its receiver has been silent for so long. Longer than usual outages, since a
    receiver that had taken it and returns makes it count twice; about equal for all peers that average together."""
    sends_only: bool = False
    """Average without reducing a part for others or being called: for a peer with little upload, or behind NAT. A peer
    without addresses does so by itself."""


class PeerConfig(_Section):
    """All settings of a peer."""

    name: str = ""
    """What people call this peer; empty derives one from its id."""
    data_dir: Path | None = None
    """Where identity, known peers and checkpoints live; none keeps everything in memory."""
    heartbeat_s: float = Field(30.0, gt=0)
    """Lifetime of the peer's own record is three of these."""
    transport: TransportConfig = TransportConfig()
    deadline: DeadlineConfig = DeadlineConfig()
    dht: DhtConfig = DhtConfig()
    host: HostConfig = HostConfig()
    client: ClientConfig = ClientConfig()
    averaging: AveragingConfig = AveragingConfig()

    @classmethod
    def preset(cls, name: PresetName, /, **overrides: Any) -> PeerConfig:
        """The settings for a run on one machine (`local`), one network (`lan`) or the internet (`wan`).

        Args:
            name: The preset.
            overrides: Fields to change; a mapping for a section changes only the fields it names.

        Raises:
            ConfigError: The preset or a field is unknown, or a value cannot work.
        """
        if name not in _PRESETS:
            raise ConfigError(f"There is no preset {name!r}.", fix=f"Use one of {', '.join(_PRESETS)}.")
        try:
            return cls.model_validate(_merged(_PRESETS[name], overrides))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"The settings cannot be used: {problems}.", fix="Correct the named fields.") from error

    @classmethod
    def from_toml(cls, path: Path) -> PeerConfig:
        """Read a profile: an optional `preset` and any fields of this class. Raises `ConfigError`."""
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as TOML: {error}", fix="Check path and syntax.") from error
        return cls.preset(values.pop("preset", "wan"), **values)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


_PRESETS: dict[str, dict[str, Any]] = {
    "wan": {"client": {"deadline": {"floor_s": 2.0}}},
    "lan": {
        "heartbeat_s": 10.0,
        "deadline": {"initial_s": 5.0, "floor_s": 0.2, "cap_s": 30.0},
        "client": {"deadline": {"initial_s": 5.0, "floor_s": 1.0, "cap_s": 30.0}},
        "dht": {"call_timeout_s": 2.0, "maintenance_s": 10.0, "watch_min_s": 0.5, "watch_max_s": 5.0},
        "averaging": {"matchmaking_s": 5.0, "round_timeout_s": 30.0, "chunk_timeout_s": 5.0},
    },
    "local": {
        "heartbeat_s": 2.0,
        "transport": {"listen_host": "127.0.0.1", "connect_timeout_s": 5.0},
        "deadline": {"initial_s": 3.0, "floor_s": 0.25, "cap_s": 10.0},
        "client": {"directory_refresh_s": 1.0, "deadline": {"initial_s": 5.0, "floor_s": 1.0, "cap_s": 10.0}},
        "dht": {"call_timeout_s": 1.0, "maintenance_s": 3.0, "watch_min_s": 0.2, "watch_max_s": 2.0},
        "host": {
            "announce_ttl_s": 6.0,
            "replica_sync_s": 5.0,
            "placement_s": 1.0,
            "drain_timeout_s": 5.0,
            "checkpoint_s": 10.0,
        },
        "averaging": {"matchmaking_s": 3.0, "round_timeout_s": 10.0, "chunk_timeout_s": 3.0},
    },
}
