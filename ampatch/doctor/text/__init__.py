"""Read the user's statements, and write them as they read when they are mended."""
