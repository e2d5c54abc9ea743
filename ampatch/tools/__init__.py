"""What the sweep and the doctor are built with: seeds, processes, numbers as text, pages and charts."""
