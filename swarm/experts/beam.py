"""Beam search for the best experts of a grid that is too large to be read whole. No I/O.

The gate's score of an expert is the sum of its coordinates' logits (product keys), so that a prefix of its coordinates
has a score too. For every token the best prefixes of each depth are kept (its beam), and what hosts list under the
beams of a whole batch is read in one go. Since what one token's beam has made known is known to all, every token takes
its best experts from the union of the beams (after Ryabinin & Gusev 2020, where each token has its own beam only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swarm.experts.prefixes import Prefix, PrefixRecord
from swarm.experts.records import rendezvous_order
from swarm.experts.spec import ExpertGrid
from swarm.identity import PeerId
from swarm.net.transport import Contact

SAMPLED_TOKENS = 256
"""So many tokens of a batch, evenly spaced, decide which prefixes are looked at."""
SCORES_AT_ONCE = 1 << 22
"""Scores (tokens x experts) that are in memory at one time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A host of an expert, as announced."""

    contact: Contact
    leaving: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        experts: Flat index of each token's best experts in the grid (row-major), best first. [tokens, k'],
            k' = min(k, what can be called)
        missing: Prefixes in the beams whose records were not known, in order.
        used: All prefixes in the beams.
        live_coordinates: For each dimension, which coordinates any known expert has. Each [dims[i]] bool
    """

    experts: Tensor
    missing: tuple[Prefix, ...]
    used: tuple[Prefix, ...]
    live_coordinates: tuple[Tensor, ...]


class Trie:
    """What is known of a grid at one moment; does not change but for holders that are found gone.

    Args:
        grid: The grid.
        children: What comes next under each prefix that was read; nothing under one that has no record.
        holders: Who holds each expert, by its coordinates, best first.
    """

    def __init__(
        self,
        grid: ExpertGrid,
        children: Mapping[Prefix, Sequence[int]],
        holders: Mapping[Prefix, tuple[Holder, ...]],
    ) -> None:
        self.holders = dict(holders)
        self.children = dict(children)
        self.dims = grid.dims
        self._prefixes: list[list[Prefix]] = [[()]]
        self._known: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._coordinates: list[Tensor] = []
        for _ in grid.dims:
            above = self._prefixes[-1]
            pairs = [(i, c) for i, prefix in enumerate(above) for c in children.get(prefix, ())]
            self._known.append(torch.tensor([prefix in children for prefix in above]))
            self._parents.append(torch.tensor([i for i, _ in pairs], dtype=torch.long))
            self._coordinates.append(torch.tensor([c for _, c in pairs], dtype=torch.long))
            self._prefixes.append([(*above[i], c) for i, c in pairs])
        self.experts = self._prefixes[-1]
        """Coordinates of every known expert, in row-major order."""
        self._at = torch.tensor(self.experts, dtype=torch.long).reshape(-1, len(grid.dims))  # [experts, dims]
        strides = [1]
        for size in reversed(grid.dims[1:]):
            strides.insert(0, strides[0] * size)
        self._flat = self._at @ torch.tensor(strides)
        self._live = tuple(
            torch.zeros(size, dtype=torch.bool).index_fill_(0, at, True)
            for size, at in zip(grid.dims, self._coordinates, strict=True)
        )

    def usable(self, avoids: Callable[[PeerId], bool]) -> Tensor:
        """Which of `experts` have a holder that is not avoided. [experts] bool"""
        return torch.tensor(
            [any(not avoids(h.contact.peer_id) for h in self.holders[at]) for at in self.experts], dtype=torch.bool
        )

    def announced(self) -> Tensor:
        """Which of `experts` have any holder. [experts] bool"""
        return self.usable(lambda _: False)

    def unread(self) -> list[Prefix]:
        """Prefixes that hosts list and whose own records are not known, the longest first."""
        found: list[Prefix] = []
        for prefixes, known in zip(reversed(self._prefixes[:-1]), reversed(self._known), strict=True):
            found += [prefix for prefix, is_known in zip(prefixes, known.tolist(), strict=True) if not is_known]
        return found

    def search(self, logits: Sequence[Tensor], k: int, width: int, usable: Tensor) -> Found:
        """The best experts of every token among those in the beams.

        Where beams of which nothing is missing hold fewer than `k` usable experts, they are widened.

        Args:
            logits: The gate's logits for each dimension. Each [tokens, dims[i]]
            k: Experts per token.
            width: Prefixes in the beam of one token.
            usable: As `usable` returns. [experts] bool
        """
        step = max(1, -(-logits[0].shape[0] // SAMPLED_TOKENS))
        sample = [one.detach()[::step].float().cpu() for one in logits]
        while True:
            at, used, missing, cut = self._beams(sample, width)
            among = usable.nonzero().flatten() if at is None else at[usable[at]]
            if len(among) >= k or not cut or missing:
                break
            width *= 2
        experts = self._best(logits, among, min(k, len(among)))
        return Found(experts, tuple(missing), tuple(used), self._live)

    def _beams(self, logits: Sequence[Tensor], width: int) -> tuple[Tensor | None, list[Prefix], list[Prefix], bool]:
        """Indices of the experts under the beams (None: all), prefixes in them, unknown ones, whether any was cut."""
        tokens = logits[0].shape[0]
        at, scores = torch.zeros(1, dtype=torch.long), torch.zeros(tokens, 1)
        used: list[Prefix] = []
        missing: list[Prefix] = []
        cut = False
        for depth, (parents, coordinates) in enumerate(zip(self._parents, self._coordinates, strict=True)):
            above = self._prefixes[depth]
            known = self._known[depth][at].tolist()
            used += [above[i] for i in at.tolist()]
            missing += [above[i] for i, is_known in zip(at.tolist(), known, strict=True) if not is_known]
            row = torch.full((len(above),), -1)
            row[at] = torch.arange(len(at))
            pairs = (row[parents] >= 0).nonzero().flatten()
            if depth == len(self.dims) - 1:
                return (pairs if cut else None), used, missing, cut
            scores = scores[:, row[parents[pairs]]] + logits[depth][:, coordinates[pairs]]
            if tokens and len(pairs) > width:
                kept = torch.unique(scores.topk(width, sorted=False).indices)  # ascending
                cut = cut or len(kept) < len(pairs)
                pairs, scores = pairs[kept], scores[:, kept]
            at = pairs
        raise AssertionError("a grid that is searched has a dimension")

    def _best(self, logits: Sequence[Tensor], among: Tensor, k: int) -> Tensor:
        at, flat = self._at[among], self._flat[among]
        size = max(1, SCORES_AT_ONCE // max(1, len(among)))
        found = []
        for block in zip(*(torch.split(one.detach().float().cpu(), size) for one in logits), strict=True):
            scores = block[0][:, at[:, 0]]
            for dimension in range(1, len(self.dims)):
                scores = scores + block[dimension][:, at[:, dimension]]
            found.append(flat[scores.topk(k).indices])
        return torch.cat(found)


@dataclass(frozen=True, slots=True)
class Told:
    """One host's entry under a prefix, with its local expiry.

    `missed` counts reads in a row that did not show it; `gone` are experts that the host says it does not hold.
    """

    record: PrefixRecord
    record_version: int
    expires_s: float
    missed: int = 0
    gone: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Node:
    told: dict[tuple[PeerId, str], Told]
    due_s: float
    used_s: float


@dataclass(slots=True)
class PrefixCache:
    """What was read of one grid: which prefixes are kept, and when they are read again. Bounded.

    Attributes:
        grid: The grid.
        refresh_s: Shortest interval between two reads of a prefix. One whose entries live for longer is read again when
            half of the rest of the shortest life is over, at the latest after `SLOWEST` intervals.
        max_prefixes: Those that were not used for longest are forgotten.
    """

    SLOWEST = 10
    EMPTY = 3
    """A prefix without entries is read again after so many intervals."""
    UNUSED = 20
    """One that no beam held for so many intervals is forgotten."""

    grid: ExpertGrid
    refresh_s: float
    max_prefixes: int
    next_expiry_s: float = field(default=float("inf"), init=False)
    """When `trie` changes by itself."""
    _nodes: dict[Prefix, _Node] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._nodes

    def answered(self, prefix: Prefix, entries: Iterable[tuple[PeerId, str, Told]], now_s: float) -> None:
        """A read is over. One may miss an entry that a peer did not show in time; two in a row mean that it is gone."""
        node = self._nodes.get(prefix)
        told = {
            place: replace(t, missed=t.missed + 1)
            for place, t in (node.told if node is not None else {}).items()
            if t.expires_s > now_s and t.missed < 1
        }
        for author, subkey, new in entries:
            before = told.get((author, subkey))
            if before is None or new.record_version > before.record_version:
                told[author, subkey] = new
            elif new.record_version == before.record_version:
                told[author, subkey] = replace(new, gone=before.gone)
        pause_s = self.EMPTY * self.refresh_s
        if told:
            left_s = min(t.expires_s for t in told.values()) - now_s
            pause_s = max(self.refresh_s, min(self.SLOWEST * self.refresh_s, left_s / 2))
        if not prefix:
            pause_s = self.refresh_s  # the way to everything else
        self._nodes[prefix] = _Node(told, now_s + pause_s, node.used_s if node is not None else now_s)

    def trim(self) -> None:
        """Keep to the bound; the root stays."""
        surplus = len(self._nodes) - self.max_prefixes
        if surplus > 0:
            for prefix in sorted((p for p in self._nodes if p), key=lambda p: (self._nodes[p].used_s, p))[:surplus]:
                del self._nodes[prefix]

    def failed(self, prefixes: Iterable[Prefix], now_s: float) -> None:
        """A read failed: it is repeated soon."""
        for prefix in prefixes:
            if prefix in self._nodes:
                self._nodes[prefix].due_s = now_s + self.refresh_s

    def used(self, prefixes: Iterable[Prefix], now_s: float) -> None:
        """These were in a beam."""
        for prefix in prefixes:
            node = self._nodes.get(prefix)
            if node is not None:
                node.used_s = now_s

    def gone(self, expert: Prefix, peer_id: PeerId) -> None:
        """The host says that it does not hold the expert: forget it until the host announces something else."""
        node = self._nodes.get(expert[:-1])
        for place, told in list(node.told.items()) if node is not None else []:
            if place[0] == peer_id and node is not None:
                node.told[place] = replace(told, gone=told.gone | {expert[-1]})

    def due(self, now_s: float) -> list[Prefix]:
        """What is to be read again, the most overdue first; forgets what nobody uses."""
        oldest_s = now_s - self.UNUSED * self.refresh_s
        for prefix in [p for p, node in self._nodes.items() if p and node.used_s < oldest_s]:
            del self._nodes[prefix]
        return sorted((p for p, n in self._nodes.items() if n.due_s <= now_s), key=lambda p: (self._nodes[p].due_s, p))

    def trie(self, now_s: float) -> Trie:
        """What is known now."""
        depth = len(self.grid.dims)
        children: dict[Prefix, list[int]] = {}
        holders: dict[Prefix, tuple[Holder, ...]] = {}
        self.next_expiry_s = float("inf")
        for prefix, node in self._nodes.items():
            by_next: dict[int, dict[PeerId, Holder]] = {}
            size = self.grid.dims[len(prefix)]
            for (author, _), told in sorted(node.told.items()):
                if told.expires_s <= now_s:
                    continue
                self.next_expiry_s = min(self.next_expiry_s, told.expires_s)
                holder = Holder(Contact(author, told.record.addresses), told.record.leaving)
                for coordinate in told.record.next:
                    if coordinate < size and coordinate not in told.gone:
                        by_next.setdefault(coordinate, {})[author] = holder
            children[prefix] = sorted(by_next)
            if len(prefix) == depth - 1:
                for coordinate, by_id in by_next.items():
                    holders[*prefix, coordinate] = self._ordered((*prefix, coordinate), by_id)
        return Trie(self.grid, children, holders)

    def _ordered(self, expert: Prefix, by_id: Mapping[PeerId, Holder]) -> tuple[Holder, ...]:
        order = rendezvous_order(self.grid.uid(*expert), by_id) if len(by_id) > 1 else list(by_id)
        return tuple(sorted((by_id[peer] for peer in order), key=lambda h: h.leaving))
