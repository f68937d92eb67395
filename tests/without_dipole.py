"""Run programs as where dipole is not installed: in a new process, or in this one."""

import sys

import pytest
from transformers import MODEL_MAPPING, dynamic_module_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WITHOUT_DIPOLE = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dipole":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_here(program, given, modules):
    """Run a program that knows no dipole and no model of it. transformers loads the code of models from `modules`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("dipole", "transformers_modules")]:
            patch.delitem(sys.modules, name)
        for mapping in (CONFIG_MAPPING, MODEL_MAPPING):
            patch.setattr(mapping, "_extra_content", {})
        for name in ("path", "meta_path"):
            patch.setattr(sys, name, list(getattr(sys, name)))
        patch.setattr(sys, "argv", ["-c", given])
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
        exec(WITHOUT_DIPOLE + program, {})
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]
