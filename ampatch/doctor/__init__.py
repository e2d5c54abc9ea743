"""Runs a script whose training breaks again under instruments, and says which operation broke it, and why."""
