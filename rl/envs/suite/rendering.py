"""Which OpenGL renders without a display: EGL or OSMesa, decided before dm_control is imported, by trying them.

`python -m dipole.rl.envs.suite.rendering` says what is used; with `--install` it first installs the missing system
packages where it may (as root, or by sudo without a password). Needs nothing but the standard library.
"""

import argparse
import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol
from weakref import WeakSet

from dipole.core.utils.errors import DipoleError
from dipole.core.utils.extras import install_line

PACKAGES = ("libegl1", "libopengl0", "libgl1-mesa-dri")
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"

_EGL_PLATFORM_DEVICE, _EGL_EXTENSIONS, _EGL_CUDA_DEVICE = 0x313F, 0x3055, 0x323A


class Closable(Protocol):
    def close(self) -> None: ...


_open: WeakSet[Closable] = WeakSet()


class RenderingError(DipoleError, RuntimeError):
    """No OpenGL library that renders without a display works on this machine; a RuntimeError as well."""


def _load(*names: str) -> ctypes.CDLL | None:
    _load_triton()
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def _load_triton() -> None:
    """Load Triton, where it is installed, before Mesa.

    Both bring an LLVM. Whoever loads Mesa's first ends in a segmentation fault when PyTorch loads Triton, as it does
    with its first optimizer; the other way round both work.
    """
    with suppress(ImportError):
        importlib.import_module("triton")


@dataclass(frozen=True)
class Device:
    """A device that EGL draws on.

    Args:
        number: among EGL's devices, as MUJOCO_EGL_DEVICE_ID counts them.
        software: whether the processor draws in its place (Mesa's llvmpipe).
        cuda: number of the GPU for CUDA; None of any other device.
    """

    number: int
    software: bool
    cuda: int | None


def egl_works() -> bool:
    """Initialise an EGL display on any device, as dm_control does, and look for an OpenGL library beside it."""
    return bool(egl_devices())


def egl_devices() -> list[Device]:
    """The devices on which EGL can be initialised, in its own order: dm_control takes the first."""
    egl = _load("libEGL.so.1", "libEGL.so")
    if egl is None or _load("libOpenGL.so.0", "libGL.so.1") is None:
        return []
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    query, display = (egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglGetPlatformDisplayEXT"))
    if not query or not display:
        return []
    devices, count = (ctypes.c_void_p * 16)(), ctypes.c_int()
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(query)
    platform_display = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(display)
    if not query_devices(len(devices), devices, ctypes.byref(count)):
        return []
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return [
        Device(number, b"EGL_MESA_device_software" in _extensions(egl, device), _cuda_number(egl, device))
        for number, device in enumerate(devices[: count.value])
        if (found := platform_display(_EGL_PLATFORM_DEVICE, device, None)) and egl.eglInitialize(found, None, None)
    ]


def _extensions(egl: ctypes.CDLL, device: int | None) -> bytes:
    address = egl.eglGetProcAddress(b"eglQueryDeviceStringEXT")
    if not address:
        return b""
    ask = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(address)
    return ask(device, _EGL_EXTENSIONS) or b""


def _cuda_number(egl: ctypes.CDLL, device: int | None) -> int | None:
    address = egl.eglGetProcAddress(b"eglQueryDeviceAttribEXT")
    if not address or b"EGL_NV_device_cuda" not in _extensions(egl, device):
        return None
    ask = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(address)
    number = ctypes.c_ssize_t()
    if ask(device, _EGL_CUDA_DEVICE, ctypes.byref(number)):
        return int(number.value)
    return None


def choose_device(devices: list[Device], visible: str) -> int | None:
    """The device of EGL that is the first GPU of CUDA_VISIBLE_DEVICES; None where EGL's own order decides."""
    first = visible.split(",")[0].strip()
    return next((each.number for each in devices if first.isdecimal() and each.cuda == int(first)), None)


def drawing() -> str:
    """What draws without a display, and whether it is the processor that does (for `dipole doctor`)."""
    backend = choose_backend()
    if backend != "egl":
        return backend
    devices, wanted = egl_devices(), os.environ.get("MUJOCO_EGL_DEVICE_ID")
    used = next((each for each in devices if wanted is None or str(each.number) == wanted), None)
    if used is None:
        return f"egl, but it has no device {wanted} (MUJOCO_EGL_DEVICE_ID)"
    if used.software:
        return "egl, in software: the processor draws (Mesa), and no GPU"
    return f"egl, device {used.number}" + (f" (CUDA's GPU {used.cuda})" if used.cuda is not None else "")


def osmesa_works() -> bool:
    """Look for an OSMesa that can make a context."""
    library = _load("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")
    return library is not None and hasattr(library, "OSMesaCreateContextExt")


BACKENDS: dict[str, Callable[[], bool]] = {"egl": egl_works, "osmesa": osmesa_works}


def choose_backend() -> str:
    """Return the backend to use and set MUJOCO_GL to it; a value that is set already, or a display, is respected.

    Raises:
        RenderingError: if no backend works; the message holds the line that installs one.
    """
    chosen = os.environ.get("MUJOCO_GL")
    if chosen:
        if chosen not in (*BACKENDS, "glfw"):
            raise RenderingError(
                f"MUJOCO_GL={chosen} is set, but only {', '.join(BACKENDS)} and glfw draw. Unset it: what works here "
                "is then chosen."
            )
        if chosen in BACKENDS and not BACKENDS[chosen]():
            raise RenderingError(f"MUJOCO_GL={chosen} is set, but that library does not work here. {_cure()}")
        if chosen == "glfw" and not _display():
            raise RenderingError(
                "MUJOCO_GL=glfw is set, but there is no display to open a window on. Unset it: what works here without "
                "one is then chosen."
            )
        _name_device(chosen)
        return chosen
    for name, works in BACKENDS.items():
        if works():
            # PyOpenGL reads its own variable and keeps the first platform it loads.
            os.environ["MUJOCO_GL"] = name
            os.environ.setdefault("PYOPENGL_PLATFORM", name)
            _name_device(name)
            return name
    if _display():
        os.environ["MUJOCO_GL"] = "glfw"
        return "glfw"
    raise RenderingError(f"neither EGL nor OSMesa works on this machine, so no environment can be drawn. {_cure()}")


def _name_device(backend: str) -> None:
    """Draw on the GPU that the process may compute on; a device that is named already is respected."""
    if backend == "egl" and os.environ.get("CUDA_VISIBLE_DEVICES") and "MUJOCO_EGL_DEVICE_ID" not in os.environ:
        device = choose_device(egl_devices(), os.environ["CUDA_VISIBLE_DEVICES"])
        if device is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)


def _display() -> bool:
    """Whether there is a display; only Linux says so in the environment."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def close_at_exit(env: Closable) -> None:
    """Close what OSMesa draws, if its user has not, before the process ends.

    dm_control frees OSMesa's contexts on a thread of their own, but only after Python has ended the threads: every
    context that is open then prints two tracebacks. The other backends draw on the caller's thread, which may go on
    after the main one has ended: nothing is closed under it.
    """
    if os.environ.get("MUJOCO_GL") == "osmesa":
        _before_threads_end()
        _open.add(env)


@cache
def _before_threads_end() -> None:
    # There is no public hook that early; the last one registered runs first, before that of concurrent.futures.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_close_open)


def _close_open() -> None:
    for env in list(_open):
        env.close()


def _cure() -> str:
    return f"On Debian or Ubuntu install it with: {INSTALL}"


def _install_suite() -> str:
    """dm_control asks for labmaze, which has wheels up to Python 3.12; its suite does without."""
    # Not `&&`, which older PowerShells have not.
    return install_line("rl") + (", and then: pip install --no-deps dm-control" if sys.version_info >= (3, 13) else "")


def import_suite() -> object:
    """Import dm_control.suite with a working backend.

    Raises:
        RenderingError: if no backend works, or dm_control was imported earlier with one that does not.
        DipoleError: if the installed mujoco is one that dm_control cannot load.
    """
    backend = choose_backend()
    try:
        import mujoco
    except ImportError as error:
        raise DipoleError(f"mujoco cannot be imported ({error}). Install it with: {install_line('rl')}") from error
    if int(mujoco.__version__.partition(".")[0]) >= 4:
        raise DipoleError(
            f"mujoco {mujoco.__version__} does not work with dm_control (every task fails to load). "
            'Install a version that does: pip install "mujoco>=3.17,<4"'
        )
    earlier = sys.modules.get("dm_control._render")
    if earlier is not None and getattr(earlier, "BACKEND", backend) not in (backend, None):
        raise RenderingError(
            f"dm_control was imported before dipole and uses {earlier.BACKEND!r}, but here {backend!r} works. "
            f"Set MUJOCO_GL={backend} or import dipole.rl.envs.control first."
        )
    try:
        from dm_control import suite
    except ImportError as error:
        if (error.name or "").startswith("dm_control"):
            raise DipoleError(f"dm_control is not installed. Install it with: {_install_suite()}") from error
        raise RenderingError(f"the {backend} library cannot be loaded ({error}). {_cure()}") from error
    except AttributeError as error:
        raise RenderingError(f"the {backend} library cannot be loaded ({error}). {_cure()}") from error
    return suite


def install() -> bool:
    """Install the system packages where that is possible without asking; True if a backend works afterwards."""
    if any(works() for works in BACKENDS.values()):
        return True
    if sys.platform != "linux" or shutil.which("apt-get") is None:
        return False
    elevate = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if elevate and shutil.which("sudo") is None:
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES],
    ):
        if subprocess.run([*elevate, *command], env=environment, stdout=subprocess.DEVNULL).returncode:
            return False
    return any(works() for works in BACKENDS.values())


def main() -> int:
    """Say which backend is used, after installing packages if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m dipole.rl.envs.suite.rendering", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--install", action="store_true", help="install missing system packages where possible")
    if parser.parse_args().install:
        install()
    try:
        print(f"rendering: {drawing()}")
    except RenderingError as error:
        print(f"rendering: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
