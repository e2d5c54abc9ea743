"""What has gone from torch, NumPy, Python and other packages, as it was: what old names stand for."""
