"""What a sweep shows in the terminal."""
