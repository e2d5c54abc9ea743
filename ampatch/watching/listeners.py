"""Who hears the events of the session: a listener goes by its line here, and its file."""

from __future__ import annotations

import sys

from ampatch.levels.overrides import parse_flag
from ampatch.session.request import Opening, SessionListener
from ampatch.session.session import SESSION
from ampatch.watching.alarms.watch import ALARMS
from ampatch.watching.misuse.watch import MisuseWatch


def listen() -> None:
    """Adds all listeners, once a process; observers add themselves."""
    SESSION.events.add(MisuseWatch(SESSION))
    SESSION.events.add(ALARMS)
    SESSION.events.add(Diagnosis())


class Diagnosis(SessionListener):
    """Opens `amp.diagnose.watch` for calls that ask for it."""

    def call_opens(self, opening: Opening) -> None:
        """Loads the doctor, which most scripts do not need."""
        if parse_flag("diagnose", opening.request.options["diagnose"]):
            sys.modules["ampatch"].diagnose  # noqa: B018

    def call_opened(self, opening: Opening) -> None:
        request = opening.request
        if parse_flag("diagnose", request.options["diagnose"]):
            diagnose = sys.modules["ampatch"].diagnose
            SESSION.enter(diagnose.watch(request.models, request.optimizers))
