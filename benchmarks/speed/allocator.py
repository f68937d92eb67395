"""What glibc does with memory that is freed: give it back, or keep it for the next allocation.

Blocks above 32 MB are mapped anew and returned at once, and every fresh page faults when it is touched. For a program
that allocates the same large blocks in every step this is half of its time; whoever splits its work into smaller blocks
pays nothing. Two programs are compared fairly in one process where neither pays.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep what it frees (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_=2^31 - 1); False without one."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
