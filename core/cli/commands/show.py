"""`dipole show`: explain one name."""

import argparse
import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from dipole.core.cli import Runner
from dipole.core.cli.app import broken_plugins
from dipole.core.cli.commands.list import KINDS
from dipole.core.cli.output import print_result
from dipole.core.objectives.registry import Entry, registry
from dipole.core.train.config import RunConfig, Settings, TrainConfig
from dipole.core.train.domains import USE, adapter_class, domain_names, kinds, parts
from dipole.core.utils.errors import ConfigError, OptionError, SpecError, nearest
from dipole.core.utils.files import is_file
from dipole.core.utils.plugins import OURS, points, shipped
from dipole.core.utils.received import read_text, read_toml
from dipole.core.utils.text import definitions, fitted, screen_width


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Explain an objective, recipe, suite or domain.

    Objectives show formula, options, source, cost and deviations from each paper.
    """
    add = parser.add_argument
    text = "objective, regularizer, diagnostic, recipe, suite, domain or .toml file; `train` for the [train] table"
    add("name", metavar="NAME", help=text)
    add("--expand", action="store_true", help="write out the rows and columns of a suite's grids")
    add("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    name = arguments.name
    tables: dict[str, type[Settings]] = {"run": RunConfig, "train": TrainConfig}
    facts: Any
    if texts := _texts(name, arguments.expand):
        facts = [{"name": name, "kind": kind, "path": str(path), "text": text} for kind, (path, text) in texts.items()]
        if len(facts) == 1:
            (facts,) = facts
        shown = "\n".join(text for _, text in texts.values())
    elif name in tables or name in domain_names():
        facts, shown = _table(name, tables.get(name) or adapter_class(name).config_model)
    elif (entry := _entry(name)) is not None:
        facts, shown = _explained(entry)
    else:
        facts, shown = _part(name.lower(), *parts()[name.lower()])
    return print_result(arguments.json, facts, shown, indent=2)


def _texts(name: str, expand: bool) -> dict[str, tuple[Path, str]]:
    """Return path and text of the suite and of the recipe of a name or path. Both may exist, the suite is first."""
    files = {"suite": shipped("suites"), "recipe": shipped("recipes")}
    found = {kind: paths[name] for kind, paths in files.items() if name in paths}
    if not found and is_file(name) and (expand or name.endswith(".toml")):
        found = {"recipe": Path(name)}
        if expand or {"rows", "columns"} & read_toml(Path(name)).keys():
            found = {"suite": Path(name)}
    if not expand:
        return {kind: (path, read_text(path)) for kind, path in found.items()}
    if "suite" not in found:
        raise ConfigError(f"--expand needs a suite, and {name!r} is none.{nearest(name, files['suite'])}")
    # The package that declares the folder of suites writes out their grids.
    written_out = import_module(f"{points('suites')[0].module}.suite").written_out
    return {"suite": (found["suite"], written_out(found["suite"]))}


def _entry(name: str) -> Entry | None:
    """Return the registered entry of a name, or None for a part of a domain. Otherwise raise SpecError."""
    word = name.lower()
    try:
        return registry.get(name)
    except SpecError as error:
        if word in parts():
            return None
        said = str(error)
    lists = {each: kind for kind in KINDS for each in (kind, kind.removesuffix("s"))}
    near, listed = nearest(word.partition(".")[0], [*kinds(), "run", "train", *lists]), "dipole list"
    if word in lists:
        near, listed = "", f"dipole list {lists[word]}"
    for folder in (Path(name), Path("runs", name)):
        if is_file(folder / "config.toml"):
            near, listed = " It is a run:", f"dipole show {folder}/config.toml"
    if said.startswith("unknown name"):
        said = said.partition(" Known: ")[0].partition(" Did you mean")[0]
        said += f"{near} `{listed}` shows what there is."
    folders = [*broken_plugins("recipes"), *broken_plugins("suites")]
    raise SpecError(said + "".join(f"\nThis plug-in cannot be used: {each}" for each in folders))


def _part(name: str, domain: str, part: type) -> tuple[dict[str, Any], str]:
    """Return facts and text of a framework of a domain."""
    about, use = inspect.getdoc(part) or "", USE["framework"].format(name=name, domain=domain)
    shown = f"{name}  (framework of {domain})\n\n{fitted(about, screen_width())}\n\nUse it with: {use}"
    return {"name": name, "kind": "framework", "domain": domain, "text": about}, shown


def _explained(entry: Entry) -> tuple[dict[str, Any], str]:
    """Return facts and text of a registered entry."""
    options: list[dict[str, Any]] = []
    for each in entry.options:
        given = {"required": False, "default": each.default}
        if each.default is inspect.Parameter.empty:
            given = {"required": True, "default": None}
        options.append({"name": each.name, "type": each.type} | given | {"range": each.range, "help": each.help})
    keys = ("name", "kind", "aliases", "summary", "formula", "source", "cost", "weight", "package")
    facts: dict[str, Any] = {key: getattr(entry, key) for key in keys}
    facts |= {"engine": _engine(entry), "options": options, "deviations": dict(entry.deviations)}
    lines = [f"{entry.name}  ({entry.kind})\n\n{fitted(entry.summary, screen_width())}\n"]
    if entry.formula:
        formula = "\n".join(f"    {line}" for line in entry.formula.splitlines())
        lines.append(fitted(formula, screen_width()) + "\n")
    labelled = (
        ("source:", entry.source),
        ("cost:", entry.cost),
        ("engine:", facts["engine"]),
        ("package:", "" if entry.package == OURS else entry.package),
        ("aliases:", ", ".join(entry.aliases)),
        ("weight:", f"{entry.weight:g} when none is written" if entry.kind == "regularizer" else ""),
    )
    lines.append(definitions((f"{label:<8}", value) for label, value in labelled if value))
    for paper, notes in entry.deviations.items():
        if notes:
            lines += [f"\ndeviations from {paper}:", definitions((("-", note) for note in notes), "  ")]
        else:
            lines.append(f"\nno deviations from {paper}")
    if options:
        rows = [(each.name, each.type, _value(each.default), each.range, each.help) for each in entry.options]
        lines.append(f"\noptions:\n{_listed(rows)}")
    return facts, "\n".join(lines)


def _engine(entry: Entry) -> str:
    """Return the engine of its row statistics at default options, or ""."""
    from dipole.core.objectives.engine import outlook
    from dipole.core.objectives.objective import Objective
    from dipole.core.objectives.term_values import asked_statistics

    if not (isinstance(entry.target, type) and issubclass(entry.target, Objective)):
        return ""
    try:
        return outlook(asked_statistics(entry.target()).values())
    except OptionError:  # an option without a default
        return ""


def _table(name: str, table: type[Settings]) -> tuple[dict[str, Any], str]:
    """Return facts and text of a table of settings."""
    rows, keys = list(setting_rows(table)), ("name", "type", "default", "range", "help")
    about = fitted(f"[{name}]  {inspect.getdoc(table) or ''}", screen_width())
    facts = {"name": name, "settings": [dict(zip(keys, row, strict=True)) for row in rows]}
    return facts, f"{about}\n\n{_listed(rows)}"


def setting_rows(table: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield name, type, default, range and help of each setting. Settings of inner tables have dotted names."""
    for key, field in table.model_fields.items():
        options = [field.annotation, *get_args(field.annotation)]
        inner = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
        if inner:
            if field.description:
                yield f"{prefix}{key}", "table", "", "", field.description
            yield from setting_rows(inner[0], f"{prefix}{key}.")
            continue
        default = "required"
        if not field.is_required():
            default = _value(field.get_default(call_default_factory=True))
        bounds = ", ".join(_bound(each) for each in field.metadata if _bound(each))
        yield f"{prefix}{key}", _type(field.annotation), default, bounds, field.description or ""


def _bound(metadata: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "pattern": "matches"}
    return " and ".join(
        f"{sign} {getattr(metadata, key)}" for key, sign in signs.items() if getattr(metadata, key, None) is not None
    )


def _type(annotation: Any) -> str:
    if annotation is ...:
        return "..."
    if get_origin(annotation) is Annotated:
        kind, *rest = get_args(annotation)
        bounds = [_bound(each) for field in rest for each in getattr(field, "metadata", ())]
        return " ".join([_type(kind), *filter(None, bounds)])
    inner = [each for each in get_args(annotation) if each is not type(None)]
    if str(get_origin(annotation)) == "typing.Literal":
        return " | ".join(map(str, inner))
    if get_origin(annotation) in (tuple, list):
        return f"[{', '.join(map(_type, inner))}]"
    if inner:
        return " or ".join(map(_type, inner))
    return getattr(annotation, "__name__", str(annotation))


def _value(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return repr(list(value))
    return str(value)


def _listed(rows: Sequence[tuple[str, ...]]) -> str:
    """Format name, type, default, range and help of settings."""
    entries: list[tuple[str, ...]] = []
    for name, kind, default, bounds, about in rows:
        if default not in ("", "required"):
            default = f"default {default}"
        entries.append((name, ", ".join(filter(None, (kind, bounds, default))), about))
    return definitions(entries, "  ")
