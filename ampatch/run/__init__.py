"""`ampatch run`: runs a script that was written for apex, unchanged."""
