"""Short names of rows for tables and charts: a level has its own, variants are V1, V2 and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ampatch.sweeps.records.sweep import AUTOCAST

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", AUTOCAST)


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the short name of each row.

    >>> keys_of(["O1", "O2 loss_scale=128", "autocast", "autocast dtype=float16"])
    {'O1': 'O1', 'O2 loss_scale=128': 'V1', 'autocast': 'autocast', 'autocast dtype=float16': 'V2'}
    """
    names = list(dict.fromkeys(names))
    variants = [name for name in names if name not in LEVELS]
    return {name: name if name in LEVELS else f"V{variants.index(name) + 1}" for name in names}


def abbreviate(text: str, keys: Mapping[str, str]) -> str:
    """Puts the short names of variants in the place of their names.

    >>> abbreviate("O2 a=12 failed, O2 a=1 diverged", keys_of(["O2 a=1", "O2 a=12"]))
    'V2 failed, V1 diverged'
    """
    variants = sorted((name for name, key in keys.items() if name != key), key=len, reverse=True)
    if not variants:
        return text
    return re.sub("|".join(map(re.escape, variants)), lambda found: keys[found[0]], text)
