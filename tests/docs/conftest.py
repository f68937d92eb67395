"""The generators of the site lie beside the pages, in no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "generate"))
