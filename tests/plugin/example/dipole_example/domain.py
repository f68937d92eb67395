"""The description of the domain before it is used: nothing heavy is imported here."""

from dipole import Domain

RINGS = Domain(
    name="rings",
    summary="points on two rings, classified by their radius",
    adapter="dipole_example.rings:RingsAdapter",
    probes={"arithmetic": "dipole_example.domain:probe"},
)


def probe() -> str:
    return "circles are round"
