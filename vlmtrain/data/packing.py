"""The packing plan: which samples share a pack, and in which order packs are trained.

A pure function of (seed, epoch, content hash, lengths, pack length): every process computes the
same plan, nothing is communicated, and a run resumes anywhere by recomputing it. Randomness comes
from an integer hash written out here, because numpy does not promise that its generators give the
same numbers in its next version.
"""

from __future__ import annotations

import bisect
import hashlib

import numpy as np

PLAN_VERSION = 1  # part of the hash: raise it whenever the plan of a seed changes
WINDOW_PACKS = 256  # best fit over this many packs' worth of samples fills over 99% of the room


def plan_epoch(
    lengths: np.ndarray, pack_length: int, seed: int, epoch: int, content_hash: str
) -> list[np.ndarray]:
    """Pack every sample exactly once.

    Samples are shuffled, cut into windows of about WINDOW_PACKS packs, and each window is packed
    by best fit decreasing; then the packs are shuffled over the whole epoch. O(n log n).

    Args:
        lengths: int64 [n] tokens of each sample, none above pack_length.
        pack_length: tokens in a pack.
        seed, epoch, content_hash: what the shuffle depends on.

    Returns:
        The packs: int64 arrays of sample numbers, together a permutation of range(n).

    Raises:
        ValueError: a sample is longer than a pack, or has no token.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= pack_length:
        raise ValueError(
            f"lengths go from {lengths.min()} to {lengths.max()}; each must be from 1 to the pack "
            f"length {pack_length}"
        )
    order = _shuffled(len(lengths), "samples", seed, epoch, content_hash)
    packs: list[np.ndarray] = []
    for window in _windows(order, lengths, WINDOW_PACKS * pack_length):
        packs += _best_fit(window, lengths[window], pack_length)
    return [packs[i] for i in _shuffled(len(packs), "packs", seed, epoch, content_hash)]


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
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        place = bisect.bisect_left(rooms, (length, -1))
        if place == len(rooms):
            free, pack = pack_length, len(packs)
            packs.append([])
        else:
            free, pack = rooms.pop(place)
        packs[pack].append(int(samples[i]))
        if free > length:
            bisect.insort(rooms, (free - length, pack))
    return [np.array(pack, dtype=np.int64) for pack in packs]


def _shuffled(count: int, purpose: str, seed: int, epoch: int, content_hash: str) -> np.ndarray:
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
