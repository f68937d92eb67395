"""Work of a device: launches, and what each computes and moves; the time it takes at a device's rates at least."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from dipole.benchmarks.speed.devices import Device

Precision = Literal["bf16", "tf32", "float32"]

# Seconds between two launches of a PyTorch program: an assumption, 4 to 10 microseconds are usual on the host.
LAUNCH = 5e-6


@dataclass(frozen=True)
class Step:
    """One launch.

    Args:
        flops: of its matrix products; elementwise arithmetic is not counted, memory bounds it.
        bytes: read from and written to the device's memory.
        exponentials: exponentials of single numbers.
        precision: of the products.
    """

    flops: float = 0.0
    bytes: float = 0.0
    exponentials: float = 0.0
    precision: Precision = "float32"

    def seconds(self, device: Device) -> float:
        """Time of this launch if products, memory and exponentials overlap perfectly."""
        return max(
            self.flops / getattr(device, self.precision),
            self.bytes / device.bytes,
            self.exponentials / device.exponentials,
        )


Work = Counter[Step]


def totals(work: Work) -> dict[str, float]:
    """Launches, floating-point operations, bytes and exponentials of all steps."""
    return {
        "launches": work.total(),
        "flops": sum(step.flops * count for step, count in work.items()),
        "bytes": sum(step.bytes * count for step, count in work.items()),
        "exponentials": sum(step.exponentials * count for step, count in work.items()),
    }


def milliseconds(work: Work, device: Device) -> dict[str, float]:
    """What each part takes at the device's peak rates, and what the whole takes at least.

    Launches follow one another; within one, the slowest part counts. A host that launches more slowly than the device
    computes is what bounds it.
    """
    total = totals(work)
    products = sum(step.flops * count / getattr(device, step.precision) for step, count in work.items())
    launches = total["launches"] * LAUNCH
    busy = sum(step.seconds(device) * count for step, count in work.items())
    parts = {
        "products": products,
        "bytes": total["bytes"] / device.bytes,
        "exponentials": total["exponentials"] / device.exponentials,
        "launches": launches,
        "at least": max(busy, launches),
    }
    return {name: 1e3 * seconds for name, seconds in parts.items()}
