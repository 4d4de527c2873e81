"""The shared body of commands that run a peer until Ctrl-C: say how it is, then leave cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.report import Reporter, short_count
from swarm.cli.stopping import run_to_end, stopping
from swarm.clock import SystemClock
from swarm.errors import ConfigError, ExpiredInviteError
from swarm.events import EventStream, Stamped
from swarm.net.addresses import LoopbackOnly
from swarm.runs.membership import PeerState, PeerStateChanged

if TYPE_CHECKING:
    from swarm.peer import Peer

TICK_S = 0.5


@contextmanager
def event_stream(reporter: Reporter, run_name: str, log_file: Path | None) -> Iterator[EventStream]:
    """The event stream of a command's peer: written to `log_file`, and its changes of state told to the user.

    Raises:
        ConfigError: The log file cannot be written.
    """
    events = EventStream(SystemClock())
    if log_file is not None:
        try:
            events.write_to(log_file)
        except OSError as error:
            raise ConfigError(f"The log file {log_file} cannot be written: {error}", fix="Name another.") from error

    def tell(stamped: Stamped) -> None:
        # LEAVING is told by `run_until_stopped`, on the main thread, which also names the way out
        if isinstance(stamped.event, PeerStateChanged) and stamped.event.state != PeerState.LEAVING:
            reporter.say(f"{stamped.event.state}  {run_name}", "state", state=stamped.event.state)
        if isinstance(stamped.event, LoopbackOnly):
            where = ", ".join(stamped.event.addresses)
            note = f"Only this machine can reach {where}; for others, name an address with --announce."
            reporter.say(f"Note: {note}", "notice", message=note)

    events.subscribe(tell)
    try:
        yield events
    finally:
        events.close()


def run_until_stopped(reporter: Reporter, peer: Peer, close: Callable[[], None]) -> None:
    """Show a peer's state until a stop is asked for, then close; a second Ctrl-C ends the process at once.

    Args:
        peer: What is shown.
        close: Leaves the run; blocking and bounded.

    Raises:
        ExpiredInviteError: The peer's membership ended while it ran; it has left.
    """
    name = peer.manifest.name
    with stopping() as stop:
        while not stop.asked and not peer.membership_ended:
            _show(reporter, peer)
            stop.wait(TICK_S)
        reporter.close()
        reporter.say(f"LEAVING  {name}: handing over; press Ctrl-C again to abort", "state", state="LEAVING")
        started = time.monotonic()
        run_to_end(close)
        seconds = time.monotonic() - started
        _tell_what_was_lost(reporter, peer)
        reporter.say(f"Left {name} after {seconds:.1f} s.", "left", run=name, seconds=round(seconds, 3))
        if peer.membership_ended:
            raise ExpiredInviteError(
                f"Your membership in {name} has ended: the invite expired.", fix="Ask the run's owner for a new invite."
            )


def _tell_what_was_lost(reporter: Reporter, peer: Peer) -> None:
    from swarm.experts.happenings import HandOverIncomplete  # by now torch is loaded anyway

    for stamped in peer.events.recent(HandOverIncomplete):
        if isinstance(event := stamped.event, HandOverIncomplete):
            named = ", ".join(event.experts) + (", ..." if event.count > len(event.experts) else "")
            note = f"{event.count} experts were not handed over ({named}): {event.reason}"
            reporter.say(f"Note: {note}", "notice", message=note)


def _show(reporter: Reporter, peer: Peer) -> None:
    stats, state, known = peer.transport.stats, peer.condition.value, len(peer.dht.peers())
    held = len(peer.host.held) if peer.host is not None else None
    parts = [f"{state}  {peer.manifest.name}"]
    if held is not None:
        parts.append(f"{held} experts")
    parts.append(f"{known} {'peer' if known == 1 else 'peers'}")
    parts.append(f"up {short_count(stats.sent_bytes, 'B')}")
    parts.append(f"down {short_count(stats.received_bytes, 'B')}")
    reporter.status(
        " · ".join(parts),
        time.monotonic(),
        (state, held, known),
        state=state,
        run=peer.manifest.name,
        experts=held,
        peers=known,
        sent_bytes=stats.sent_bytes,
        received_bytes=stats.received_bytes,
    )
