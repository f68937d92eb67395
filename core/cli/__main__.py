"""Run `dipole` as `python -m dipole.core.cli`, as older packages of `dipole new` do. `python -m dipole` is the same."""

import sys

from dipole.core.cli import main

sys.exit(main())
