"""Hooks of mkdocs: add generated pages, rewrite links out of docs/, fail on undocumented names."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from functools import cache
from typing import Any

import committed
import docstrings
import drawing
import install
import layout
import links
import objectives
import public
import toy
import tutorials
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from dipole.core.cli.commands.show import setting_rows

MEMBERS = "    options:\n      heading: {name}\n      toc_label: {short}\n"
LONG = 15
"""A class or function whose docstrings have this many lines, those of methods included, has its own page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation, and the address of the repository if there is one."""
    if address := install.repository():
        config.repo_url, config.repo_name = address, "repository"
    pages = {
        "tutorials/": ["tutorials/index.md", *(f"tutorials/{script.stem}.md" for script in tutorials.scripts())],
        "objectives/": ["objectives/index.md", *(f"objectives/{entry.name}.md" for entry in objectives.entries())],
        "results/suites/": [f"results/suites/{section.id}.md" for section in committed.pages()],
        "reference/": navigation(),
    }
    config.nav = _expanded(config.nav, pages)
    return config


def _expanded(entries: list[Any], pages: dict[str, list[Any]]) -> list[Any]:
    """Replace the folders of generated pages in the navigation."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append(entry)
            continue
        for title, value in entry.items():
            below = _expanded(value, pages) if isinstance(value, list) else pages.get(value, value)
            found.append({title: below})
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated files. Fail if a public name is undocumented."""
    if wrong := docstrings.problems() + objectives.problems():
        raise PluginError("\n".join(wrong))

    def add(name: str, content: str | bytes) -> None:
        files.append(File.generated(config, name, content=content))

    add("pictures/whole.svg", drawing.whole())
    for name, content in committed.report_files().items():
        add(name, content)
    for section in committed.pages():
        for name, content in committed.suite_files(section):
            add(f"results/suites/{name}", content)
    for entry in objectives.entries():
        added = objectives.ADDED[entry.name]
        add(f"objectives/{entry.name}.md", objectives.page(entry))
        add(f"objectives/{entry.name}-formula.svg", drawing.formula(added["tex"]))
        if "option" in added:
            values = added["values"], added.get("fixed", "")
            add(f"objectives/{entry.name}-weights.svg", drawing.weight_picture(entry.name, added["option"], *values))
        add(f"objectives/{entry.name}-toy.svg", toy.toy_picture(objectives.toys(entry.name), added.get("told", "")))
    add("objectives/index.md", objectives.overview())
    for room, names in rooms().items():
        add(f"reference/{room}.md", reference(room, names))
    site = tutorials.Site.of(config.site_url, config.repo_url, config.extra.get("colab"))
    for script in tutorials.scripts():
        for name, content in tutorials.files(script, run=config.extra["run_tutorials"], site=site):
            add(f"tutorials/{name}", content)
    add("tutorials/index.md", tutorials.index())
    for path in brought():
        add(links.place(path), links.shown(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links out of docs/."""
    if page.file.generated_by:
        return markdown
    return links.rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Label the cells of tables, and link class names in the reference to their documentation."""
    html = layout.labelled(html)
    places = classes() if page.file.src_uri.startswith(("reference/", "objectives/")) else {}

    def linked(match: re.Match[str]) -> str:
        place = places.get(match[1])
        return f'<autoref identifier="{place}" optional>{match[0]}</autoref>' if place else match[0]

    return re.sub(r"<code>(\w+)</code>", linked, html)


@cache
def classes() -> dict[str, str]:
    """Map public classes with a unique name to their definition."""
    found: dict[str, set[str]] = defaultdict(set)
    for place, value in public.public_names().values():
        if inspect.isclass(value):
            found[value.__name__].add(place)
    return {name: place for name, (place, *others) in found.items() if not others}


def brought() -> list[str]:
    """Return files and folders of the repository that pages link to, directly or indirectly."""
    folder = links.ROOT / "docs"
    pages = sorted(path.relative_to(folder) for path in folder.rglob("*.md"))
    waiting = [f"docs/{page.as_posix()}" for page in pages if page.parts[0] != "templates"]
    found: list[str] = []
    while waiting:
        page = waiting.pop()
        if page.endswith(".md"):
            linked = links.outside((links.ROOT / page).read_text(encoding="utf-8"), page).values()
            new = [path for path in linked if path not in found and not path.startswith("docs/")]
            found += dict.fromkeys(new)
            waiting += new
    return found


@cache
def rooms() -> dict[str, list[str]]:
    """Return the pages of the reference: one per package, at most three names deep, and one for each long name."""
    found: dict[str, list[str]] = {}
    for name, (_, value) in sorted(public.public_names().items()):
        room = found.setdefault(room_of(name, value), [])
        # Some file systems ignore case: `dipole.Objective` has its page, and `dipole.objective` is on that of `dipole`.
        if is_long(name, value) and name.lower() not in map(str.lower, found):
            found[name] = [name]
        else:
            room.append(name)
    return dict(sorted(found.items()))


def is_long(name: str, value: Any) -> bool:
    """Return whether a class or a function has a page of its own."""
    shown = [each for entry in public.entries_of(name, value) for each in (entry, *public.members(entry))]
    return sum(len(each.doc.splitlines()) for each in shown) >= LONG


def own_pages(room: str) -> list[str]:
    """Return the names of a package that have pages of their own."""
    homes = public.public_names()
    return [name for name in rooms() if name in homes and name != room and room_of(name, homes[name][1]) == room]


def navigation() -> list[dict[str, list[str]]]:
    """Return the pages of each package, its own first."""
    packages = [room for room in rooms() if room not in public.public_names() or own_pages(room)]
    return [{room: [f"reference/{name}.md" for name in (room, *own_pages(room))]} for room in packages]


def room_of(name: str, value: Any) -> str:
    """Return the package whose page has a public name or a link to it."""
    parts = name.split(".")[: None if inspect.ismodule(value) else -1][:3]
    folder = links.ROOT.joinpath(*parts[1:])
    return ".".join(parts if folder.is_dir() else parts[:2])


def reference(room: str, names: list[str]) -> str:
    """Return one page of the reference."""
    homes = public.public_names()
    parts = [f"# {room}"]
    if long := own_pages(room):
        lines = [f"- [`{name.removeprefix(f'{room}.')}`]({name}.md): {said(homes[name][1])}" for name in long]
        parts.append("\n".join(["On pages of their own:", "", *lines]))
    for name in names:
        short = name.rpartition(".")[2]
        place, value = homes[name]
        options = MEMBERS.format(name=name, short=short)
        private = [each.name for each in public.members(public.Entry("", value, None)) if each.owner is not value]
        if private:
            options += f"      inherited_members: [{', '.join(each.removeprefix('.') for each in private)}]\n"
        parts.append(f"::: {place}\n{options}")
        parts += [each for each in (settings(value), elsewhere(value)) if each]
    return "\n\n".join(parts) + "\n"


def said(value: Any) -> str:
    """Return the first sentence of a docstring."""
    first = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.) (?=\D)", " ".join(first.split()))[0].rstrip(":")


def settings(value: Any) -> str:
    """Return a table of the settings or fields that the class's docstring does not explain."""
    if not (inspect.isclass(value) and issubclass(value, BaseModel)):
        return ""
    told = docstrings.explained(inspect.getdoc(value) or "")
    lines = [
        f"| `{name}` | {', '.join(filter(None, (kind, bounds)))} | {default} | {said} |"
        for name, kind, default, bounds, said in (
            [cell.replace("|", "\\|") for cell in row] for row in setting_rows(value)
        )
        if name.partition(".")[0] not in told
    ]
    head = [f"Fields of `{value.__name__}`:", "", "| Name | Type | Default | Description |", "|---|---|---|---|"]
    return "\n".join([*head, *lines]) if lines else ""


def elsewhere(value: Any) -> str:
    """List methods without a docstring and the base class that documents each."""
    found: dict[str, list[str]] = defaultdict(list)
    for entry in public.members(public.Entry("", value, None)):
        base = docstrings.documented_at(entry) if not entry.doc else None
        if base is not None:
            package = base.__module__.partition(".")[0]
            place = f"`{base.__qualname__}`" if package == "dipole" else f"the `{base.__qualname__}` of {package}"
            found[place].append(f"`{entry.name.removeprefix('.')}`")
    return " ".join(f"As in {place}: {', '.join(methods)}." for place, methods in found.items())
