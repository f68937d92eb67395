"""Which OpenGL renders without a display: EGL or OSMesa, decided before dm_control is imported, by trying them.

`python -m dipole.rl.envs.suite.rendering` says what is used; with `--install` it first installs the missing system
packages where it may (as root, or by sudo without a password). Needs nothing but the standard library.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Protocol
from weakref import WeakSet

from dipole.core.ground.errors import DipoleError
from dipole.core.ground.extras import install_line

PACKAGES = ("libegl1", "libopengl0", "libgl1-mesa-dri")
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"

_EGL_PLATFORM_DEVICE = 0x313F


class Closable(Protocol):
    def close(self) -> None: ...


_open: WeakSet[Closable] = WeakSet()


class RenderingError(DipoleError, RuntimeError):
    """No OpenGL library that renders without a display works on this machine."""


def _load(*names: str) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def egl_works() -> bool:
    """Initialise an EGL display on any device, as dm_control does, and look for an OpenGL library beside it."""
    egl = _load("libEGL.so.1", "libEGL.so")
    if egl is None or _load("libOpenGL.so.0", "libGL.so.1") is None:
        return False
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    query, display = (egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglGetPlatformDisplayEXT"))
    if not query or not display:
        return False
    devices, count = (ctypes.c_void_p * 16)(), ctypes.c_int()
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(query)
    platform_display = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(display)
    if not query_devices(len(devices), devices, ctypes.byref(count)):
        return False
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return any(
        (found := platform_display(_EGL_PLATFORM_DEVICE, device, None)) and egl.eglInitialize(found, None, None)
        for device in devices[: count.value]
    )


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
        return chosen
    for name, works in BACKENDS.items():
        if works():
            # PyOpenGL reads its own variable and keeps the first platform it loads.
            os.environ["MUJOCO_GL"] = name
            os.environ.setdefault("PYOPENGL_PLATFORM", name)
            return name
    if _display():
        os.environ["MUJOCO_GL"] = "glfw"
        return "glfw"
    raise RenderingError(f"neither EGL nor OSMesa works on this machine, so no environment can be drawn. {_cure()}")


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
            "Install a version that does: pip install 'mujoco>=3.17,<4'"
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
            raise DipoleError(f"dm_control is not installed. Install it with: {install_line('rl')}") from error
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
        print(f"rendering: {choose_backend()}")
    except RenderingError as error:
        print(f"rendering: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
