"""One rank of a run of several processes: `dipole train` that ends when its launcher is gone.

torchrun gives every rank a session of its own, which a kill of the runner's process group does not reach.
"""

import os
import sys

from dipole.benchmarks.run.worker import follow
from dipole.core.cli import main

if __name__ == "__main__":
    follow(os.getppid())
    sys.exit(main(sys.argv[1:]))
