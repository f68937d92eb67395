"""What mkdocs calls: pages that are generated, links that lead out of docs/, and what fails the build."""

from __future__ import annotations

from collections import defaultdict

import committed
import drawing
import evidence
import links
import objectives
import public
import toy
import tutorials
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MEMBERS = "    options:\n      heading: {name}\n      toc_label: {short}\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages where the navigation names their folder."""
    pages = {
        "tutorials/": ["tutorials/index.md", *(f"tutorials/{script.stem}.md" for script in tutorials.scripts())],
        "objectives/": ["objectives/index.md", *(f"objectives/{entry.name}.md" for entry in objectives.entries())],
        "reference/": [f"reference/{room}.md" for room in rooms()],
    }
    config.nav = [
        {title: pages.get(value, value) if isinstance(value, str) else value}
        for item in config.nav
        for title, value in item.items()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated; refuse to build where something public says nothing of itself."""
    wrong = [f"{name} has no docstring with a sentence" for name in public.undocumented()]
    wrong += [f"{name} is an argument that its docstring does not name" for name in public.unexplained()]
    wrong += objectives.problems()
    if wrong:
        raise PluginError("\n".join(wrong))

    def add(name: str, content: str | bytes) -> None:
        files.append(File.generated(config, name, content=content))

    add("pictures/whole.svg", drawing.whole())
    add(committed.PAGE, committed.page())
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
    """Fill in tables; turn links that lead out of docs/."""
    if page.file.generated_by:
        return markdown
    return links.rewritten(evidence.filled(markdown), f"docs/{page.file.src_uri}", page.file.src_uri)


def brought() -> list[str]:
    """Files and folders of the repository that pages link to, and those that these link to."""
    docs = sorted((links.ROOT / "docs").glob("*.md"))
    waiting = [f"docs/{path.name}" for path in docs]
    found: list[str] = []
    while waiting:
        page = waiting.pop()
        if page.endswith(".md"):
            linked = links.outside((links.ROOT / page).read_text(encoding="utf-8"), page).values()
            new = [path for path in linked if path not in found and not path.startswith("docs/")]
            found += dict.fromkeys(new)
            waiting += new
    return found


def rooms() -> dict[str, list[str]]:
    """Pages of the reference: the packages that export, and those of core that the documentation imports from."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in public.public_names():
        found[".".join(name.split(".")[:-1][:3])].append(name)
    return dict(sorted(found.items()))


def reference(room: str, names: list[str]) -> str:
    """One page of the reference."""
    homes = public.public_names()
    parts = [f"# {room}"]
    for name in names:
        short = name.rpartition(".")[2]
        parts.append(f"::: {homes[name][0]}\n{MEMBERS.format(name=name, short=short)}")
    return "\n\n".join(parts) + "\n"
