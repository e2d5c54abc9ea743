"""Who hears the events of the session: a listener goes by its line here, and its file."""

from __future__ import annotations

from ampatch.session.session import SESSION
from ampatch.watching.alarms.watch import ALARMS
from ampatch.watching.diagnosis import Diagnosis
from ampatch.watching.misuse.watch import MisuseWatch


def listen() -> None:
    """Adds all listeners, once a process; observers add themselves."""
    SESSION.events.add(MisuseWatch(SESSION))
    SESSION.events.add(ALARMS)
    SESSION.events.add(Diagnosis())
