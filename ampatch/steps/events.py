"""Events of training: what an engine publishes, and listeners that may hear of it, or of none at all."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Generic, TypeVar

Callbacks = tuple[Callable[[object], object], ...]
Opening = TypeVar("Opening")
Block = TypeVar("Block")
Amp = TypeVar("Amp")
Backward = TypeVar("Backward")


class Listener(Generic[Opening, Block, Amp, Backward]):
    """Hears what happens in a session; each method is an event, and one that stays as it is costs nothing.

    It says of which types are a call of `initialize` while it is set up, a block of `scale_loss`, and what
    is kept for an optimizer: this file knows none of them. What a method raises reaches the script.
    """

    def call_opens(self, opening: Opening) -> None:
        """A call of `initialize` was checked, and is about to change models and optimizers."""

    def call_is_set_up(self, opening: Opening) -> None:
        """The call has changed all it changes; if this raises, all of it is undone."""

    def call_opened(self, opening: Opening) -> None:
        """The call is over: nothing may raise any more."""

    def block_begins(self, block: Block) -> None:
        """A block of `scale_loss` is about to yield its scaled loss."""

    def block_ends(self, block: Block) -> None:
        """A block ends; its gradients are about to be unscaled, or dropped after an exception."""

    def block_ended(self, block: Block) -> None:
        """A block has ended well."""

    def plain_backward_begins(self, backward: Backward) -> None:
        """A backward begins whose gradients are not scaled, in a session where some are."""

    def plain_backward_ended(self, backward: Backward) -> None:
        """It has ended, or raised."""

    def late_backward_begins(self, _: None) -> None:
        """A backward begins at a scaled loss, of which the block has ended."""

    def wrapper_is_used(self, wrapper: object) -> None:
        """A block names an optimizer of the session by a wrapper around it."""

    def step_begins(self, amp: Amp) -> None:
        """A step has been called, and nothing of it is done."""

    def step_ended(self, amp: Amp) -> None:
        """A step was taken, or skipped."""

    def session_closes(self, _: None) -> None:
        """All that the session has changed is about to be undone."""

    def session_closed(self, _: None) -> None:
        """All of it has been undone."""


class Events:
    """The listeners of a session: of each event the functions that are to be called, in their order.

    Whoever publishes one calls them: `for callback in events.block_begins: callback(block)`.
    """

    if TYPE_CHECKING:

        def __getattr__(self, event: str) -> Callbacks:
            """What is called at an event, by the name of the method that hears of it."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._sort()

    def add(self, listener: Listener) -> None:
        """Tells a listener of what happens from now on, after those that are there."""
        self._listeners += (listener,)
        self._sort()

    def remove(self, listener: Listener) -> None:
        """Tells it no longer."""
        self._listeners = tuple(one for one in self._listeners if one is not listener)
        self._sort()

    def _sort(self) -> None:
        for name, silent in vars(Listener).items():
            if name.startswith("_"):
                continue
            hearing = [one for one in self._listeners if getattr(type(one), name) is not silent]
            setattr(self, name, tuple(getattr(one, name) for one in hearing))


class Changes:
    """Counts what may leave a half weight with a gradient of its own: backward passes and assignments."""

    count = 0


class Surroundings:
    """What blocks and steps ask of the session around them; a copied optimizer is in none, and has these."""

    changes: Changes | None = None  # None where nobody sees them

    def __init__(self) -> None:
        self.events = Events()

    def capture(self) -> list | None:
        """Returns what collects what the replay of a CUDA graph must repeat, while one is captured."""
        return None

    def begin_step(self, frame: FrameType) -> None:
        """A wrapper around an optimizer begins a step, in this frame."""

    def end_step(self, frame: FrameType) -> None:
        """That step has ended."""

    def call_closure(self, closure: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Calls the closure of such a step."""
        return closure(*args, **kwargs)

    def begin_scaled_block(self, block: object) -> None:
        """A block begins whose gradients are multiplied by a scale."""

    def end_scaled_block(self, block: object) -> None:
        """Such a block ends."""

    def end_block(self) -> None:
        """A block ends."""
