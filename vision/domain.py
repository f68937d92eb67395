"""The domains of this package, as `dipole list domains` and `dipole doctor` know them; nothing heavy is imported."""

from dipole.core.train.domains import Domain

VISION = Domain(
    name="vision",
    summary="images: SimCLR, CMC, MoCo-v2 and SwAV, with probes on the frozen encoder",
    adapter="dipole.vision.adapter:VisionAdapter",
    extra="vision",
)
TOY = Domain(
    name="toy",
    summary="points in the plane (LMCL Sec. 6): a linear map of four numbers, clustered by k-means",
    adapter="dipole.vision.toy:ToyAdapter",
    extra="vision",
)
