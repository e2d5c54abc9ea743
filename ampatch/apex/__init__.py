"""Lets programs that were written for apex run: gives them a package of that name.

```python
import ampatch.apex
ampatch.apex.install()

from apex import amp
```

Without a real apex, `apex.amp` is `ampatch.apex.amp`, and so are `apex.parallel`, `apex.optimizers`,
`apex.normalization`, `apex.fp16_utils`, `apex.multi_tensor_apply`, `amp_C` and `apex_C`. With one,
what it still has stays its own, and what is missing is filled in.
"""

from ampatch.apex.drop_in import ApexFinder

__all__ = ["install", "uninstall"]


def install(**overrides: object) -> None:
    """Makes `import apex` work from now on, also in processes that multiprocessing starts.

    The overrides are given to `initialize` whatever the program passes, as by `ampatch.override`.
    Installing again changes nothing but the overrides.
    """
    finder = ApexFinder.installed() or ApexFinder.install()
    if overrides:
        finder.override(overrides)


def uninstall() -> None:
    """Undoes `install`, and does nothing without it. The program keeps what it has imported by then."""
    finder = ApexFinder.installed()
    if finder is not None:
        finder.uninstall()
