"""The domains of this package, for `dipole list domains` and `dipole doctor`. This module imports nothing heavy."""

from dipole.core.train.domains import Domain

VISION = Domain(
    name="vision",
    summary="images: SimCLR, MoCo-v2, SwAV, CMC and blocks, with probes on the frozen encoder",
    adapter="dipole.vision.adapter:VisionAdapter",
    extra="vision",
    exported="dipole.vision.exported:open_folder",
)
TOY = Domain(
    name="toy",
    summary="points in the plane (LMCL Sec. 5.1): a linear map of four numbers, clustered by k-means",
    adapter="dipole.vision.toy:ToyAdapter",
    extra="vision",
)
