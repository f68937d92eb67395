"""Bring the targets of links out of docs/ into the site."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def place(path: str) -> str:
    """Return the place of a repository path in the site, or "" if it does not exist."""
    found = ROOT / path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if found.is_dir():
        return f"source/{path}.md"
    if not found.is_file():
        return ""
    return f"project/{found.name.lower()}" if found.suffix == ".md" else f"source/{path}"


def outside(markdown: str, page: str) -> dict[str, str]:
    """Map a page's links out of docs/ to paths from the repository root."""
    folder = Path(page).parent
    found = {}
    for _, target, _, _ in LINK.findall(markdown):
        path = normpath((folder / target).as_posix())
        if not path.startswith(("docs/", "..")) or not page.startswith("docs/"):
            found[target] = path
    return {target: path for target, path in found.items() if place(path)}


def rewritten(markdown: str, page: str, site_page: str) -> str:
    """Rewrite such links to their places in the site."""
    targets = outside(markdown, page)

    def moved(match: re.Match[str]) -> str:
        opened, target, anchor, closed = match.groups()
        if target not in targets:
            return match.group()
        return f"{opened}{relpath(place(targets[target]), Path(site_page).parent)}{anchor or ''}{closed}"

    return LINK.sub(moved, markdown)


def shown(path: str) -> bytes:
    """Return the site's content for a file or folder of the repository."""
    found = ROOT / path
    if found.is_dir():
        parts = [f"# {path}/\n"]
        for file in sorted(found.glob("*.py")):
            parts.append(f"## {file.name}\n\n```python\n{file.read_text(encoding='utf-8')}```\n")
        return "\n".join(parts).encode()
    if found.suffix == ".md":
        return rewritten(found.read_text(encoding="utf-8"), path, place(path)).encode()
    return found.read_bytes()
