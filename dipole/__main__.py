"""`python -m dipole` is the command `dipole`."""

import sys

from dipole.core.cli import main

sys.exit(main())
