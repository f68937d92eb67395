"""Makes `SentenceTransformer(path)` know exported encoders in a process that never imports dipole.

sentence-transformers 6 loads a model type that is not its own only where that type is registered already, or with
`trust_remote_code=True`, and has no hook for packages that bring one. PyTorch has: it calls the entry points of the
group "torch.backends" when it is imported, and sentence-transformers imports it. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns
this off.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec


class _Watch:
    """Finds nothing; the first search for a module of sentence-transformers registers our model type."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "sentence_transformers":
            sys.meta_path.remove(self)
            with suppress(ImportError):  # the text extra is not installed: nothing of ours can be loaded
                import_module("dipole.text.export")
        return None


def register() -> None:
    """Wait for sentence-transformers; nothing else is imported before it is used."""
    if not any(isinstance(each, _Watch) for each in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
