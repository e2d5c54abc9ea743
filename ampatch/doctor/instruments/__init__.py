"""Follow a run of a script: its modules, operations, backward passes and steps, and what broke in them."""
