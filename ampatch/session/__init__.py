"""One session: builds the casts, models and steps of a call of `initialize`, and owns their undo.

Imports all folders of the engine; the public functions are here.
"""
