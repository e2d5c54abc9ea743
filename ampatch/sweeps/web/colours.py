"""Which colour and which dashes a row has, the same in every sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampatch.sweeps.records.row_names import LEVELS, keys_of

# O0 has the colour of the text, which comes first. The others are the result of a search for colours that
# keep the largest distance in CIELAB from each other, for normal vision and, simulated as by Machado et al.
# (2009), without one kind of cones; near the hues of Okabe and Ito (2008), with a contrast of 3.2 or more to
# both backgrounds. The tests measure distance and contrast.
LIGHT = ("#16191d", "#605ce4", "#b47911", "#139993", "#14425f", "#83240d", "#a767c3", "#798656")
DARK = ("#e8eaed", "#6f6ef6", "#c54a06", "#88c07e", "#5bd1fd", "#a85567", "#8465a4", "#f9c925")

# Shades for the parts of a whole, which lie side by side in the order of their legend.
LIGHT_PARTS = ("#1c1f66", "#4294d8", "#486265", "#d3774f", "#4a2b0e")
DARK_PARTS = ("#ddf0f5", "#64a6f2", "#61687a", "#fbca6e", "#ab4e2f")

DASHES = (None, "7 3", "2 2.5", "10 3 2 3", "14 4", "5 2 1.5 2 1.5 2")


@dataclass(frozen=True, slots=True)
class Look:
    """How a row looks in every chart: a short key, and the numbers of its colour and of its dashes."""

    name: str
    key: str
    colour: int
    dashes: str | None

    @property
    def label(self) -> str:
        """Returns the name, after the key where there is one: variants may begin alike."""
        return self.name if self.key == self.name else f"{self.key} · {self.name}"

    @property
    def style(self) -> str:
        """Returns the name of the class that sets the colour."""
        return f"k{self.colour}"


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """Returns the look of each row; a variant is called V1, V2, ... where there is no room for its name.

    >>> [(look.key, look.colour) for look in looks_of(["O0", "O2 loss_scale=128", "O4"]).values()]
    [('O0', 0), ('V1', 7), ('O4', 4)]
    """
    places = dict.fromkeys([*LEVELS, *names])
    keys = keys_of(names)
    return {name: look_of(name, keys[name], list(places).index(name)) for name in names}


def look_of(name: str, key: str, place: int) -> Look:
    """Returns the look of a row; the levels have the first places, variants follow."""
    turn, colour = divmod(place - 1, len(LIGHT) - 1) if place else (0, -1)
    # Who shares a colour has other dashes.
    return Look(name, key, colour + 1, DASHES[(colour + 1 + turn) % len(DASHES)])
