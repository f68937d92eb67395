"""What GPUs can do at most, by their makers' documents: the rates that a model of time divides by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    Args:
        bf16: dense tensor-core products with float32 sums, in floating-point operations per second.
        tf32: the same of float32 numbers rounded to TF32.
        float32: full float32 products, outside the tensor cores.
        bytes: memory bandwidth per second.
        exponentials: per second: 16 a cycle and multiprocessor.
        source: the document of these numbers.
    """

    bf16: float
    tf32: float
    float32: float
    bytes: float
    exponentials: float
    source: str


# 16 results of ex2 a cycle and multiprocessor for compute capability 8.0 to 10.0: CUDA C++ Programming Guide, table
# "Throughput of Native Arithmetic Instructions"; times multiprocessors, times the boost clock.
DEVICES = {
    "A100": Device(
        312e12, 156e12, 19.5e12, 2.039e12, 16 * 108 * 1.410e9, "NVIDIA A100 datasheet, SXM 80 GB; 108 SM at 1.41 GHz"
    ),
    "H100": Device(
        989.4e12, 494.7e12, 66.9e12, 3.35e12, 16 * 132 * 1.980e9,
        "NVIDIA H100 architecture white paper and datasheet, SXM5; 132 SM at 1.98 GHz",
    ),
    "H200": Device(
        989.4e12, 494.7e12, 66.9e12, 4.8e12, 16 * 132 * 1.980e9, "NVIDIA H200 datasheet, SXM; 132 SM at 1.98 GHz"
    ),
    "B200": Device(
        2250e12, 1125e12, 75e12, 8.0e12, 16 * 148 * 1.965e9,
        "NVIDIA HGX B200 datasheet, dense rates (half of those with sparsity); 148 SM at 1.965 GHz",
    ),
}  # fmt: skip
