"""The domains of this package, for `dipole list domains` and `dipole doctor`. This module imports nothing heavy."""

from dipole.core.train.domains import Domain

VISION = Domain(
    name="vision",
    summary="images: SimCLR, MoCo-v2, SwAV, CMC and blocks, with probes on the frozen encoder",
    adapter="dipole.vision.adapter:VisionAdapter",
    extra="vision",
    exported="dipole.vision.exported:open_folder",
    parts="dipole.vision.frameworks:by_name",
)
TOY = Domain(
    name="toy",
    summary="small sets drawn by the seed: LMCL's points in the plane, and Gaussian classes with known factors",
    adapter="dipole.vision.toy:ToyAdapter",
    extra="vision",
)
