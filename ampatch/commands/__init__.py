"""What several commands need: scripts run as Python runs them, and the tables as text.

Imports public names, and `casts` for the tables.
"""
