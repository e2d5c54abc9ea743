"""One loss and one step: scale, backward, unscale, agree, step or skip; master params and gradients.

Imports `levels` alone.
"""
