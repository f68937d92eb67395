"""The domain of this package, for `dipole list domains` and `dipole doctor`. Imports nothing heavy."""

from dipole.core.train.domains import Domain

TEXT = Domain(
    name="text",
    summary="sentences: Quick Thoughts, blocks, SimCSE and pairs of your own, with the SentEval tasks",
    adapter="dipole.text.adapter:TextAdapter",
    extra="text",
    exported="dipole.text.exported:open_folder",
)
