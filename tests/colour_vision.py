"""Contrast of colours, and how far apart they are for people who see few of them."""

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# IEEE Transactions on Visualization and Computer Graphics 15(6), 2009: severity 1.0, for linear RGB.
NORMAL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
TRITANOPIA = (
    (1.255528, -0.076749, -0.178779),
    (-0.078411, 0.930809, 0.147602),
    (0.004733, 0.691367, 0.303900),
)
# IEC 61966-2-1 (sRGB), D65.
XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
WHITE = (0.95047, 1.0, 1.08883)


def linear(colour: str) -> list[float]:
    """Returns the linear red, green and blue of "#rrggbb" or "rgb(r, g, b)"."""
    if colour.startswith("#"):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    else:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix, vector) -> list[float]:
    """Returns the product of a matrix and a vector."""
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.2."""
    low, high = sorted(times((XYZ[1],), linear(colour))[0] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, vision=NORMAL) -> list[float]:
    """Returns CIELAB coordinates of a colour as it is seen."""
    seen = [min(max(part, 0.0), 1.0) for part in times(vision, linear(colour))]
    parts = [part / white for part, white in zip(times(XYZ, seen), WHITE, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116 for part in parts)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def distance(one: str, other: str, vision=NORMAL) -> float:
    """Returns the distance of two colours in CIELAB; 2.3 is about what can just be seen side by side."""
    return sum((a - b) ** 2 for a, b in zip(lab(one, vision), lab(other, vision), strict=True)) ** 0.5
