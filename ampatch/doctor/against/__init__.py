"""Compares the first steps of a script at two levels, and says which module departs first."""
