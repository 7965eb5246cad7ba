"""Sharing rows: among the stages, between training and evaluation, and among blended sources.

Rows with the same prompt always stay together: of one source, no stage and no evaluation sees another's prompts.
Everything is decided by the seed and the rows alone.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from rlhf.config.data import Weight
from rlhf.data.records import Row

T = TypeVar("T")


def prompt_key(row: Row) -> str:
    """Identity of a row's prompt, of a text without one that of the text; letter case and white space do not count."""
    text = row.text or row.response or ""
    return " ".join(text.split()).casefold()


def split(items: Sequence[T], shares: Mapping[str, float], *, seed: int, key: Callable[[T], str]) -> dict[str, list[T]]:
    """Cut `items` into disjoint parts of about the given shares.

    Items of one key form a group; groups are ordered by a seeded hash and cut where the count of items comes
    nearest to each share. Every part gets at least one group while there are enough of them. Within a part,
    items keep their order. Parts with a share of 0 are empty.
    """
    keys = [key(item) for item in items]
    order = {name: _hash(seed, name) for name in set(keys)}
    sizes: dict[str, int] = dict.fromkeys(sorted(order, key=order.__getitem__), 0)
    for name in keys:
        sizes[name] += 1
    filled = [0, *accumulate(sizes.values())]  # items in the first n groups
    named = [name for name, share in shares.items() if share > 0]
    total = sum(shares.values())
    part_of: dict[str, str] = {}
    start, reached = 0, 0.0
    for position, name in enumerate(named):
        reached += shares[name] / total * len(items)
        later = len(named) - position - 1
        nearest = min(range(len(filled)), key=lambda cut: abs(filled[cut] - reached)) if later else len(sizes)
        end = max(min(nearest, len(sizes) - later), min(start + 1, len(sizes)))
        part_of.update(dict.fromkeys(list(sizes)[start:end], name))
        start = end
    parts: dict[str, list[T]] = {name: [] for name in shares}
    for name, item in zip(keys, items, strict=True):
        parts[part_of[name]].append(item)
    return parts


def blend(counts: Sequence[int], weights: Sequence[Weight], *, seed: int) -> list[list[int]]:
    """Indices of the rows to keep of each source, so that the sources are in proportion to their weights.

    No row is repeated: the source that is scarcest for its weight is kept whole, of the others a seeded sample. Those
    of weight `all` are kept whole, and say nothing of the others.
    """
    pairs = [*zip(counts, weights, strict=True)]
    scale = min((count / weight for count, weight in pairs if count and weight != "all"), default=0.0)
    sizes = [count if weight == "all" else min(count, max(1, round(scale * weight))) for count, weight in pairs]
    return [
        sorted(random.Random(f"blend {seed} {number}").sample(range(count), size))
        for number, (count, size) in enumerate(zip(counts, sizes, strict=True))
    ]


def varied(items: Sequence[T], *, seed: int, key: Callable[[T], str]) -> list[T]:
    """The items in random order, one of each key before any comes again."""
    shuffled = random.Random(f"heldout {seed}").sample(items, len(items))
    seen: Counter[str] = Counter()
    rounds = []
    for item in shuffled:
        rounds.append(seen[key(item)])
        seen[key(item)] += 1
    return [item for _, item in sorted(zip(rounds, shuffled, strict=True), key=lambda pair: pair[0])]


def _hash(seed: int, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
