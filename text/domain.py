"""The domain of this package, as `dipole list domains` and `dipole doctor` know it; nothing heavy is imported."""

from dipole.core.train.domains import Domain

TEXT = Domain(
    name="text",
    summary="sentences: Quick Thoughts, blocks, SimCSE and pairs of your own, with the SentEval tasks",
    adapter="dipole.text.adapter:TextAdapter",
    extra="text",
    exported="dipole.text.exported:open_folder",
)
