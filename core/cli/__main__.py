"""`python -m dipole.core.cli` is the command `dipole`; `torchrun -m` needs a module."""

import sys

from dipole.core.cli import main

sys.exit(main())
