"""What a sweep will run, checked before any time is spent."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ampatch import OPT_LEVELS, AmpValueError
from ampatch.script import level_overrides

LEVELS = tuple(OPT_LEVELS)


@dataclass(frozen=True, slots=True)
class Run:
    """One process to come: a script, its arguments, and what `initialize` is made to use."""

    name: str
    script: str
    script_arguments: tuple[str, ...]
    overrides: dict[str, str | None]
    directory: str

    @property
    def log(self) -> Path:
        """Returns the file that takes what the script prints."""
        return Path(self.directory, f"{self.name}.log")

    @property
    def progress(self) -> Path:
        """Returns the file in which the child counts its steps."""
        return Path(self.directory, f"{self.name}.steps")

    @property
    def measured(self) -> Path:
        """Returns the file in which the child leaves what it measured."""
        return Path(self.directory, f"{self.name}.json")

    def to_json(self) -> str:
        """Writes the run as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Run":
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"script_arguments": tuple(fields["script_arguments"])})


@dataclass(frozen=True, slots=True)
class Plan:
    """A script, its arguments, and the levels to train it at."""

    script: Path
    script_arguments: tuple[str, ...] = ()
    levels: tuple[str, ...] = LEVELS
    timeout: float | None = None

    def __post_init__(self) -> None:
        validate_script(self.script)
        validate_levels(self.levels)
        if self.timeout is not None and not self.timeout > 0:
            raise AmpValueError(f"timeout {self.timeout!r}: expected seconds, more than 0")

    def runs(self, directory: str) -> Iterator[Run]:
        """Yields the runs in the order in which they start; their files go to `directory`."""
        script = str(self.script.absolute())
        for level in self.levels:
            yield Run(level, script, self.script_arguments, level_overrides(level), directory)


def validate_script(script: Path) -> None:
    """Raises unless `script` is a file that can be read."""
    if script.is_dir():
        raise AmpValueError(f"'{script}' is a directory: expected a Python script")
    if not script.is_file():
        raise AmpValueError(f"'{script}' does not exist: expected a Python script")


def validate_levels(levels: Sequence[str]) -> None:
    """Raises unless `levels` are opt levels, at least one, none of them twice."""
    expected = f"expected one or more of {', '.join(LEVELS)}, parted by commas"
    if not levels:
        raise AmpValueError(f"no levels: {expected}")
    for level in levels:
        if level not in LEVELS:
            raise AmpValueError(f"unknown opt_level {level!r}: {expected}")
        if levels.count(level) > 1:
            raise AmpValueError(f"opt_level {level!r} is there twice: name each level once")
