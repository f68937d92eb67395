"""Choose the OpenGL that renders without a display, EGL or OSMesa, before dm_control is imported.

`python -m dipole.rl.envs.suite.rendering` prints the choice. With `--install` it first installs missing system
packages, as root or by sudo without a password. This file needs nothing but the standard library.
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
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

from dipole.core.utils.errors import DipoleError
from dipole.core.utils.extras import install_line

PACKAGES = ("libegl1", "libopengl0", "libgl1-mesa-dri")
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
_CURE = f"On Debian or Ubuntu install it with: {INSTALL}"

_EGL_PLATFORM_DEVICE, _EGL_EXTENSIONS, _EGL_CUDA_DEVICE = 0x313F, 0x3055, 0x323A


class RenderingError(DipoleError, RuntimeError):
    """No OpenGL library on this machine renders without a display."""


def _load(*names: str) -> ctypes.CDLL | None:
    with suppress(ImportError):  # before Mesa: in the other order their two LLVMs end in a segmentation fault
        importlib.import_module("triton")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class Device(NamedTuple):
    """A device that EGL draws on: its number (MUJOCO_EGL_DEVICE_ID), and CUDA's number of the same GPU, or None.

    With `software` the processor draws in its place (Mesa's llvmpipe).
    """

    number: int
    software: bool
    cuda: int | None


@cache
def egl_devices() -> list[Device]:
    """Return the devices on which EGL can be initialised. dm_control takes the first."""
    egl = _load("libEGL.so.1", "libEGL.so")
    if egl is None or _load("libOpenGL.so.0", "libGL.so.1") is None:
        return []
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    pointer, number, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    query = _extension(egl, b"eglQueryDevicesEXT", unsigned, number, pointer, pointer)
    display = _extension(egl, b"eglGetPlatformDisplayEXT", pointer, unsigned, pointer, pointer)
    devices, count = (pointer * 16)(), number()
    if query is None or display is None or not query(len(devices), devices, ctypes.byref(count)):
        return []
    text = _extension(egl, b"eglQueryDeviceStringEXT", ctypes.c_char_p, pointer, number)
    attribute = _extension(egl, b"eglQueryDeviceAttribEXT", unsigned, pointer, number, pointer)
    egl.eglInitialize.argtypes = [pointer, pointer, pointer]
    found = []
    for index, device in enumerate(devices[: count.value]):
        shown = display(_EGL_PLATFORM_DEVICE, device, None)
        if not shown or not egl.eglInitialize(shown, None, None):
            continue
        extensions = (text is not None and text(device, _EGL_EXTENSIONS)) or b""
        cuda, value = None, ctypes.c_ssize_t()
        has_cuda = attribute is not None and b"EGL_NV_device_cuda" in extensions
        if has_cuda and attribute(device, _EGL_CUDA_DEVICE, ctypes.byref(value)):
            cuda = int(value.value)
        found.append(Device(index, b"EGL_MESA_device_software" in extensions, cuda))
    return found


def _extension(egl: ctypes.CDLL, name: bytes, *types: Any) -> Any:
    """Return a function of an extension with these result and argument types, or None."""
    address = egl.eglGetProcAddress(name)
    return ctypes.CFUNCTYPE(*types)(address) if address else None


def choose_device(devices: list[Device], visible: str) -> int | None:
    """Return EGL's number of the first GPU in CUDA_VISIBLE_DEVICES, or None if it has no such device."""
    first = visible.split(",")[0].strip()
    return next((each.number for each in devices if str(each.cuda) == first), None)


def drawing() -> str:
    """Describe for `dipole doctor` what draws without a display, GPU or processor."""
    backend = choose_backend()
    if backend != "egl":
        return backend
    devices, wanted = egl_devices(), os.environ.get("MUJOCO_EGL_DEVICE_ID")
    used = next((each for each in devices if wanted is None or str(each.number) == wanted), None)
    if used is None:
        return f"egl, but it has no device {wanted} (MUJOCO_EGL_DEVICE_ID)"
    if used.software:
        return "egl, in software: the processor draws (Mesa), and no GPU"
    if used.cuda is None:
        return f"egl, device {used.number}"
    return f"egl, device {used.number} (CUDA's GPU {used.cuda})"


def osmesa_works() -> bool:
    """Return whether there is an OSMesa that can make a context."""
    library = _load("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")
    return library is not None and hasattr(library, "OSMesaCreateContextExt")


BACKENDS: dict[str, Callable[[], bool]] = {"egl": lambda: bool(egl_devices()), "osmesa": osmesa_works}


def choose_backend() -> str:
    """Return the backend and set MUJOCO_GL to it. Your own value stays. Raise RenderingError if none works."""
    chosen = os.environ.get("MUJOCO_GL")
    if chosen:
        if chosen not in (*BACKENDS, "glfw"):
            raise RenderingError(
                f"MUJOCO_GL={chosen} is set, but only {', '.join(BACKENDS)} and glfw draw. Unset it: what works here "
                "is then chosen."
            )
        if chosen in BACKENDS and not BACKENDS[chosen]():
            raise RenderingError(f"MUJOCO_GL={chosen} is set, but that library does not work here. {_CURE}")
        if chosen == "glfw" and not _display():
            raise RenderingError(
                "MUJOCO_GL=glfw is set, but there is no display to open a window on. Unset it: what works here without "
                "one is then chosen."
            )
    else:
        chosen = next((name for name, works in BACKENDS.items() if works()), "")
        if chosen:
            # PyOpenGL reads its own variable and keeps the first platform it loads.
            os.environ.setdefault("PYOPENGL_PLATFORM", chosen)
        elif _display():
            chosen = "glfw"
        else:
            raise RenderingError(
                f"neither EGL nor OSMesa works on this machine, so no environment can be drawn. {_CURE}"
            )
        os.environ["MUJOCO_GL"] = chosen
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "egl" and visible and "MUJOCO_EGL_DEVICE_ID" not in os.environ:
        device = choose_device(egl_devices(), visible)  # the GPU that the process computes on
        if device is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
    return chosen


def _display() -> bool:
    """Return whether there is a display. Only Linux has variables for it."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def close_at_exit(env: Any) -> None:
    """Close an environment that OSMesa draws before Python ends its threads.

    dm_control frees OSMesa's contexts on a thread, and prints two tracebacks for each that is open after that. The
    other backends draw on the caller's thread, which may run on after the main one has ended.
    """
    if os.environ.get("MUJOCO_GL") == "osmesa":
        # No public hook is that early. The last one registered runs first, before that of concurrent.futures.
        threading._register_atexit(_close, ref(env))  # type: ignore[attr-defined]


def _close(env: ref[Any]) -> None:
    opened = env()
    if opened is not None:
        opened.close()


def import_suite() -> object:
    """Import dm_control.suite. Raise RenderingError without a working backend, DipoleError for a wrong mujoco."""
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
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("dm_control"):
            command = install_line("rl")
            if sys.version_info >= (3, 13):  # dm_control needs labmaze, which has no wheels here. Its suite does not
                command += ", and then: pip install --no-deps dm-control"
            raise DipoleError(f"dm_control is not installed. Install it with: {command}") from error
        raise RenderingError(f"the {backend} library cannot be loaded ({error}). {_CURE}") from error
    return suite


def install() -> bool:
    """Install the system packages where no password is needed. Return whether a backend works afterwards."""
    if any(works() for works in BACKENDS.values()):
        return True
    if sys.platform != "linux" or shutil.which("apt-get") is None:
        return False
    command = ["sh", "-c", INSTALL]
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            return False
        command = ["sudo", "-n", *command]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    return done.returncode == 0 and any(works() for works in BACKENDS.values())


def main() -> int:
    """Print which backend is used, after installing packages if asked."""
    parser = argparse.ArgumentParser("python -m dipole.rl.envs.suite.rendering", description=__doc__.split("\n")[0])
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
