"""What `apex.contrib` resolves to: its early optimizers. For its kernels, see `missing.py`."""
