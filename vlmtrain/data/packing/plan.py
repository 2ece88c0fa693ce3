"""The packing plan: which samples share a pack, in which order packs are trained, and by whom.

A pure function of (seed, epoch, content hash, lengths, costs, pack length, policy, PLAN_VERSION):
every process computes the same plan, nothing is communicated, and a run resumes anywhere by
recomputing it. Which packs a global batch holds does not depend on the number of data-parallel
ranks; only the deal inside the batch does, so a run may continue on another number of them.
Randomness comes from an integer hash written out here, because numpy does not promise that its
generators give the same numbers in its next version.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

PLAN_VERSION = 2  # part of the hash: raise it whenever the plan of a seed changes
WINDOW_PACKS = 256  # best fit over this many packs' worth of samples fills over 99% of the room

Policy = Literal["balanced", "best_fit", "bucket", "in_order", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
BY_COST = ("balanced", "best_fit")  # those whose packs are dealt to the ranks by their cost

_EVEN_FILL = 0.998  # what `_even` aims at; it reaches a few thousandths less
_EVEN_SHARE = 10  # samples of at least this fraction of a pack are placed by cost
_EVEN_TRIES = 64  # packs looked at for one sample, cheapest first
_EVEN_LOSS = 0.005  # packs that evenness may cost beyond best fit's


@dataclass(frozen=True)
class Plan:
    """The packs of one epoch in the order of training."""

    packs: list[np.ndarray]  # int64 sample numbers
    tokens: np.ndarray  # int64 [packs]
    costs: np.ndarray  # int64 [packs], in the unit of the samples' costs

    def __len__(self) -> int:
        return len(self.packs)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.packs)


def plan_epoch(
    lengths: np.ndarray,
    pack_length: int,
    seed: int,
    epoch: int,
    content_hash: str,
    *,
    costs: np.ndarray | None = None,
    policy: Policy = "balanced",
    entries: np.ndarray | None = None,
) -> Plan:
    """Pack every entry exactly once.

    balanced: samples are shuffled, cut into windows of about WINDOW_PACKS packs, and each window
    is packed so that the packs are full and cost the same, as far as single samples allow; the
    packs are shuffled over the whole epoch. best_fit: the same, full only. For comparison with
    what others do: bucket (samples of like length together), in_order (shuffled samples one after
    the other, a new pack where one does not fit), none (a pack for each sample). O(n log n).

    Args:
        lengths: int64 [n] tokens of each sample, none above pack_length.
        pack_length: tokens that a pack holds at most.
        seed, epoch, content_hash: what the shuffle depends on.
        costs: int64 [n] cost of each sample; default: its length.
        policy: see above.
        entries: sample numbers to train in this epoch, some perhaps twice; default: all once.

    Returns:
        The packs; together a permutation of `entries`.

    Raises:
        ValueError: a sample is longer than a pack or has no token, or an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= pack_length:
        raise ValueError(
            f"lengths go from {lengths.min()} to {lengths.max()}; each must be from 1 to the pack "
            f"length {pack_length}"
        )
    costs = lengths if costs is None else costs
    entries = np.arange(len(lengths)) if entries is None else entries
    order = entries[shuffled(len(entries), "samples", seed, epoch, content_hash)]
    packs: list[np.ndarray] = []
    if policy == "none":
        packs = [np.array([sample]) for sample in order.tolist()]
    elif policy == "in_order":
        packs = _next_fit(order, lengths[order], pack_length)
    else:
        for window in _windows(order, lengths, WINDOW_PACKS * pack_length):
            if policy == "bucket":
                window = window[np.argsort(lengths[window], kind="stable")]
                packs += _next_fit(window, lengths[window], pack_length)
                continue
            full = _best_fit(window, lengths[window], pack_length)
            if policy == "balanced":
                even = _even(window, lengths[window], costs[window], pack_length)
                if len(even) <= len(full) * (1 + _EVEN_LOSS):
                    full = even
            packs += full
        mixed = shuffled(len(packs), "packs", seed, epoch, content_hash)
        packs = [packs[i] for i in mixed.tolist()]
    totals = [[int(array[pack].sum()) for pack in packs] for array in (lengths, costs)]
    return Plan(packs, *(np.array(total, dtype=np.int64) for total in totals))


def deal(costs: np.ndarray, ranks: int, policy: Policy = "balanced") -> list[list[int]]:
    """Give each rank the same number of packs, of about the same cost in all.

    Heaviest first to the rank with the least so far (LPT) among those with room; the policies for
    comparison go around in turn.

    Args:
        costs: int64 [G] of the packs of one global batch.
        ranks: a divisor of G.

    Returns:
        For each rank the positions of its packs, ascending.
    """
    if policy not in BY_COST:
        return [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    share = len(costs) // ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    waiting = [(0, rank) for rank in range(ranks)]
    for position in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(waiting)
        dealt[rank].append(position)
        if len(dealt[rank]) < share:
            heapq.heappush(waiting, (load + int(costs[position]), rank))
    return [sorted(positions) for positions in dealt]


def epoch_entries(
    source: np.ndarray, weights: Sequence[float], seed: int, epoch: int, content_hash: str
) -> np.ndarray:
    """The samples of an epoch where a source with weight w is to be seen w times.

    Each source is an endless row of shuffled passes over its samples, of which epoch e takes
    places floor(e w n) to floor((e + 1) w n): with weight 0.25 four epochs see each sample exactly
    once, with weight 2 each epoch sees each exactly twice.

    Args:
        source: int [n] source of each sample.
        weights: above 0, one for each source.
    """
    if all(weight == 1 for weight in weights):
        return np.arange(len(source))
    chosen = []
    for number, weight in enumerate(weights):
        samples = np.flatnonzero(source == number)
        if not len(samples):
            continue
        first, last = (int(e * weight * len(samples) + 1e-6) for e in (epoch, epoch + 1))
        place = first
        while place < last:
            cycle, offset = divmod(place, len(samples))
            stop = min(len(samples), offset + last - place)
            order = shuffled(len(samples), f"source {number}", seed, cycle, content_hash)
            chosen.append(samples[order[offset:stop]])
            place += stop - offset
    return np.concatenate(chosen) if chosen else np.arange(0)


def _windows(order: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Cut `order` where another `tokens` tokens are complete; a small rest joins its neighbour."""
    total = np.cumsum(lengths[order])
    if not len(total):
        return []
    count = max(round(int(total[-1]) / tokens), 1)
    cuts = np.searchsorted(total, int(total[-1]) / count * np.arange(1, count))
    return np.split(order, cuts)


def _best_fit(samples: np.ndarray, lengths: np.ndarray, pack_length: int) -> list[np.ndarray]:
    """Longest first, each into the fullest pack that still has room for it."""
    packs: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable").tolist()
    _fill(packs, [], order, lengths.tolist(), pack_length)
    return [samples[pack] for pack in packs]


def _even(
    samples: np.ndarray, lengths: np.ndarray, costs: np.ndarray, pack_length: int
) -> list[np.ndarray]:
    """Packs that are full and cost about the same.

    The number of packs is fixed first. Large samples go, most costly first, each into the
    cheapest pack with room; then the rest and the small ones fill up by best fit.
    """
    count = max(-(-int(lengths.sum()) // int(pack_length * _EVEN_FILL)), 1)
    packs: list[list[int]] = [[] for _ in range(count)]
    free = [pack_length] * count
    sizes, prices = lengths.tolist(), costs.tolist()
    cheapest = [(0, pack) for pack in range(count)]
    rest = []
    for i in np.lexsort((-lengths, -costs)).tolist():
        passed: list[tuple[int, int]] = []
        if sizes[i] * _EVEN_SHARE >= pack_length:
            while cheapest and len(passed) < _EVEN_TRIES:
                cost, pack = heapq.heappop(cheapest)
                if free[pack] >= sizes[i]:
                    packs[pack].append(i)
                    free[pack] -= sizes[i]
                    passed.append((cost + prices[i], pack))
                    break
                passed.append((cost, pack))
            else:
                rest.append(i)
            for entry in passed:
                heapq.heappush(cheapest, entry)
        else:
            rest.append(i)
    rest.sort(key=lambda i: -sizes[i])
    rooms = sorted((room, pack) for pack, room in enumerate(free) if room)
    _fill(packs, rooms, rest, sizes, pack_length)
    return [samples[pack] for pack in packs if pack]


def _fill(
    packs: list[list[int]],
    rooms: list[tuple[int, int]],
    order: list[int],
    sizes: list[int],
    pack_length: int,
) -> None:
    """Put each of `order` into the fullest of `packs` with room; rooms: (free, pack), ascending."""
    for i in order:
        place = bisect.bisect_left(rooms, (sizes[i], -1))
        if place == len(rooms):
            free, pack = pack_length, len(packs)
            packs.append([])
        else:
            free, pack = rooms.pop(place)
        packs[pack].append(i)
        if free > sizes[i]:
            bisect.insort(rooms, (free - sizes[i], pack))


def _next_fit(samples: np.ndarray, lengths: np.ndarray, pack_length: int) -> list[np.ndarray]:
    """One after the other; a new pack where the next does not fit."""
    cuts, free = [], pack_length
    for place, length in enumerate(lengths.tolist()):
        if length > free:
            cuts.append(place)
            free = pack_length
        free -= length
    return np.split(samples, cuts) if len(samples) else []


def shuffled(count: int, purpose: str, seed: int, epoch: int, content_hash: str) -> np.ndarray:
    """A permutation of range(count): the order of splitmix64 hashes."""
    text = f"{PLAN_VERSION}|{purpose}|{seed}|{epoch}|{content_hash}"
    start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")
