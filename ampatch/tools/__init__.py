"""What the sweep and the doctor share: seeds, child processes and their folders, tensors in values."""
