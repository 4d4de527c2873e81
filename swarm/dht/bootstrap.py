"""First contact: dial every bootstrap address at once, and say what was wrong with each that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from swarm.errors import BootstrapError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact, Transport

GRACE_S = 1.0
"""How long other peers may still answer when the first one has."""
RECALLED_ADDRESSES = 2
"""Addresses tried of a remembered peer."""


async def bootstrap_addresses(
    transport: Transport, addresses: Sequence[tuple[str, PeerId | None]], remembered: Sequence[Contact] = ()
) -> list[Contact]:
    """Say hello at all addresses at once, until one has worked for each peer, or `GRACE_S` after the first success.

    An address that keeps silent so costs the full patience only where none works.

    Args:
        transport: Started.
        addresses: `host:port` with the id of the peer that should answer there, if it is known.
        remembered: Peers met before an earlier end, which are tried along with them.

    Returns:
        The peers that answered in time, in the order of the addresses, each once; remembered ones first.

    Raises:
        BootstrapError: None answered; `reasons` says why for each address, `remembered` which of them are not among
            `addresses`.
    """
    given = dict.fromkeys(address for address, _ in addresses)
    recalled = [
        (a, contact.peer_id) for contact in remembered for a in contact.addresses[:RECALLED_ADDRESSES] if a not in given
    ]
    wanted = [*recalled, *addresses]
    deadline_s = transport.config.transport.connect_timeout_s
    reasons: dict[str, str] = {}

    async def dial(address: str, expect: PeerId | None) -> Contact | None:
        try:
            async with asyncio.timeout(deadline_s):
                return await transport.dial(address, expect)
        except SwarmError as error:
            reasons[address] = str(error)
        except TimeoutError:
            reasons[address] = f"no answer within {deadline_s:g} s"
        return None

    loop = asyncio.get_running_loop()
    expected = [expect for _, expect in wanted]
    tasks = [loop.create_task(dial(*entry), name=f"bootstrap {entry[0]}") for entry in wanted]
    contacts: dict[PeerId, Contact] = {}
    until_s: float | None = None
    try:
        while True:
            open_ = [
                task
                for task, expect in zip(tasks, expected, strict=True)
                if not task.done() and (expect is None or expect not in contacts)
            ]
            left_s = None if until_s is None else until_s - loop.time()
            if not open_ or (left_s is not None and left_s <= 0):
                break
            await asyncio.wait(open_, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            contacts = {}
            for contact in [task.result() for task in tasks if task.done()]:
                if contact is not None:
                    contacts.setdefault(contact.peer_id, contact)
            if contacts and until_s is None:
                until_s = loop.time() + GRACE_S
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not contacts:
        raise _nobody(addresses, recalled, reasons)
    return list(contacts.values())


def _nobody(
    addresses: Sequence[tuple[str, PeerId | None]], recalled: Sequence[tuple[str, PeerId]], reasons: dict[str, str]
) -> BootstrapError:
    def listed(some: Iterable[str]) -> str:
        return "; ".join(f"{address}: {reasons.get(address, 'not tried')}" for address in dict.fromkeys(some))

    message = f"None of {len(addresses)} bootstrap addresses led into the run ({listed(a for a, _ in addresses)})."
    if recalled:
        message += f" Nor did {len(recalled)} remembered from earlier ({listed(a for a, _ in recalled)})."
    return BootstrapError(
        message,
        fix="Check that the first peer runs and can be reached from here, or get an invite with current addresses.",
        reasons=reasons,
        remembered=tuple(dict.fromkeys(address for address, _ in recalled)),
    )
