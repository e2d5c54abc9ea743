"""What is left on disk of the step at which training broke; `ampatch doctor --open` reads it."""
