"""The processes of a sweep: one run each, fresh, watched and stopped."""
