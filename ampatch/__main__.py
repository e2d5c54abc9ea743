"""Makes `python -m ampatch` the same as `ampatch`."""

import sys

from ampatch.cli import main

sys.exit(main())
