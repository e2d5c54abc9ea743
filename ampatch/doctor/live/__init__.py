"""The doctor inside of a running script: records each step cheaply, and replays one that breaks."""
