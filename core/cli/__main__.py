"""Run the command `dipole` as `python -m dipole.core.cli`, for example under `torchrun -m`."""

import sys

from dipole.core.cli import main

sys.exit(main())
