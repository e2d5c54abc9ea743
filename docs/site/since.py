"""Marks each name on the page of the API with the version that it came with."""

import griffe


class Since(griffe.Extension):
    """Labels what modules hold: all of it came with `first`, but for those `later`, by their whole names."""

    def __init__(self, first: str, later: dict[str, str]) -> None:
        self.first, self.later = first, later

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Adds a label to a function, class or value of a module, none to its methods."""
        if obj.parent is not None and obj.parent.is_module:
            obj.labels.add(f"since {self.later.get(obj.path, self.first)}")
