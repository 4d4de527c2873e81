"""Whose word counts in a lookup: peers that name others who turn out not to exist lose it. No I/O.

Ids are proved by a hello, but whoever is asked may name any id at any address, nearer to the position than all real
peers. Every such contact would cost the lookup a dial and its patience. So each contact counts only as long as somebody
who named it is believed: known from the start, or not caught naming more dead contacts than live ones. Honest peers
name dead ones too, when others have just died; these are few, or others name the same.

Liars who name one another, all of them real, are told by their number: ids are uniform, and a part of all peers lies
thinner around any position than all of them do.
"""

from __future__ import annotations

from collections.abc import Sequence

MISSES = 3
"""So many contacts that do not answer cost a teller its word, unless as many have answered."""
THIN = 2.5
"""Peers found so many times sparser than others elsewhere are hardly all that there are. Of 8 found among all peers and
20 known, chance makes that of 1 %; where a fifth of all shows only itself, 93 % are, where three tenths do, 72 %."""
TELLERS = 4
"""Tellers remembered for each contact."""


class Hearsay:
    """Who named whom in one lookup, by node id."""

    def __init__(self) -> None:
        self._tellers: dict[bytes, list[bytes]] = {}
        self._balance: dict[bytes, list[int]] = {}

    def named(self, contact: bytes, teller: bytes) -> None:
        """`teller` says that `contact` exists. Contacts that nobody named are known first-hand."""
        tellers = self._tellers.setdefault(contact, [])
        if teller in tellers:
            return
        if len(tellers) == TELLERS:  # liars who came first must not keep out an honest word
            tellers[:] = [known for known in tellers if self._believed(known)]
        if len(tellers) < TELLERS:
            tellers.append(teller)

    def forget(self, contact: bytes) -> None:
        """The contact is to be tried whoever named it."""
        self._tellers.pop(contact, None)

    def first_hand(self, contact: bytes) -> bool:
        """Whether nobody had to name the contact."""
        return contact not in self._tellers

    def proved(self, contact: bytes) -> None:
        """It has answered."""
        for teller in self._tellers.get(contact, ()):
            self._balance.setdefault(teller, [0, 0])[0] += 1

    def refuted(self, contact: bytes) -> None:
        """It has not answered."""
        for teller in self._tellers.get(contact, ()):
            self._balance.setdefault(teller, [0, 0])[1] += 1

    def counts(self, contact: bytes) -> bool:
        """Whether anybody who named the contact is still believed, or it is known first-hand."""
        tellers = self._tellers.get(contact)
        return tellers is None or any(self._believed(teller) for teller in tellers)

    def _believed(self, teller: bytes) -> bool:
        hits, misses = self._balance.get(teller, (0, 0))
        return misses < MISSES or misses <= hits


def is_thin(found: Sequence[int], elsewhere: Sequence[int]) -> bool:
    """Whether the peers found around one position are much sparser than those around another.

    Args:
        found: Their distances from the position.
        elsewhere: Distances of the peers known best, those around ourselves.
    """
    return bool(found and elsewhere) and max(found) * len(elsewhere) > THIN * len(found) * max(elsewhere)
