"""What scripts of earlier years say and today's torch, NumPy and Python do not take, and how it is found."""
