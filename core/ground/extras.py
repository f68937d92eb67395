"""The line that installs what is missing: from a checkout as well as from an index."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlparse


def install_line(extra: str = "", package: str = "dipole") -> str:
    """What to type so that a distribution has the packages of one of its extras.

    Args:
        extra: name of the extra; "" for the distribution itself.
        package: the distribution that declares it.
    """
    wanted = f"[{extra}]" if extra else ""
    folder = _checkout(package)
    if folder:
        return f"pip install -e {shlex.quote(folder + wanted)}"
    return f"pip install {shlex.quote(package + wanted)}"


def _checkout(package: str) -> str:
    """The folder that an editable installation runs from; "" for one from an index."""
    try:
        origin = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    if not origin.get("dir_info", {}).get("editable"):
        return ""
    return unquote(urlparse(origin["url"]).path)
