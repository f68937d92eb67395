"""Grids: rows and columns of a suite written as axes, which are multiplied out before the suite is read.

docs/background/benchmarks.md explains them. A value of an axis can be a table with a name. Its other keys go into the
row or column, and its `set` comes last. `[row]` and `[column]` are the defaults of all rows and columns.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from dipole.benchmarks.claims.published import row_label
from dipole.benchmarks.manifest import filled
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import Term, format_terms, parse
from dipole.core.utils.errors import ConfigError, RegistryError, SpecError, nearest

MOST = 100_000  # Limit for the rows, columns and cells of a suite. More are taken for a mistake.
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """One value of an axis: its text, and the keys it adds to a row or column."""

    text: str
    brings: Entry


Axes = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Grid:
    """Axes by name, groups of axes that walk together, and excluded points (axis -> texts)."""

    where: str
    axes: Axes
    zipped: tuple[tuple[str, ...], ...] = ()
    excluded: tuple[Mapping[str, tuple[str, ...]], ...] = ()

    def points(self) -> Iterator[dict[str, Value]]:
        """Yield the points that are not excluded, the first axis slowest."""
        together = {axis: group for group in self.zipped for axis in group}
        groups = list(dict.fromkeys(together.get(axis, (axis,)) for axis in self.axes))
        count = prod(len(self.axes[group[0]]) for group in groups)
        if count > MOST:
            sizes = " x ".join(str(len(self.axes[group[0]])) for group in groups)
            raise ConfigError(f"{self.where} has {count:,} points ({sizes}); at most {MOST:,} are multiplied out.")
        for places in product(*(range(len(self.axes[group[0]])) for group in groups)):
            point = {axis: self.axes[axis][i] for group, i in zip(groups, places, strict=True) for axis in group}
            if not any(all(point[axis].text in texts for axis, texts in out.items()) for out in self.excluded):
                yield point

    def without(self, left_out: Sequence[str]) -> "Grid":
        kept = {axis: values for axis, values in self.axes.items() if axis not in left_out}
        zipped = tuple(left for group in self.zipped if (left := tuple(axis for axis in group if axis in kept)))
        excluded = tuple(out for out in self.excluded if out.keys() <= kept.keys())
        return replace(self, axes=kept, zipped=zipped, excluded=excluded)


def expand(suite: Entry) -> dict[str, Any]:
    """Multiply out all grids of a suite. Raise ConfigError if an axis is empty or unused, or points are too many."""
    found = {key: value for key, value in suite.items() if key not in ("grid", "row", "column")}
    shared = read_grid(suite.get("grid", {}), "[grid]")
    scales = found.get("scale", {})
    for name in ("row", "column"):
        if not isinstance(suite.get(name, {}), Mapping):
            raise ConfigError(f"[{name}] is a table with the defaults of every {name}.")
    if isinstance(scales, Mapping):
        found["scale"] = dict(scales)
        for name, scale in scales.items():
            if isinstance(scale, Mapping):
                found["scale"][name] = _expanded(scale, suite, shared, f" of scale {name!r}")
    return _expanded(found, suite, shared, "")


def _expanded(part: Entry, suite: Entry, shared: Grid, of: str) -> dict[str, Any]:
    """Multiply out the rows and columns of a suite or of one scale."""
    found = dict(part)
    if _are_entries(part.get("columns")):
        columns = [{**suite.get("column", {}), **column} for column in part["columns"]]
        found["columns"] = [new for column in columns for _, new in _multiplied(column, "name", Grid("", {}), of)]
    if _are_entries(part.get("rows")):
        rows = [{**suite.get("row", {}), **row} for row in part["rows"]]
        useless = [axis for axis in shared.axes if not any(_takes(row, axis) for row in rows)]
        if useless:
            raise ConfigError(_unused(useless[0], rows, shared.where))
        pairs = [(row, point, new) for row in rows for point, new in _multiplied(row, "method", shared, of)]
        found["rows"] = [new for _, _, new in pairs]
        if shared.axes:
            found["rows"] = list(_with_bases(pairs, suite.get("base")))
            found.pop("base", None)  # each row names its own
    return found


def _multiplied(entry: Entry, name: str, shared: Grid, of: str) -> Iterator[tuple[dict[str, Value], dict[str, Any]]]:
    """Yield an entry at each point of its own and the shared grid. The name gets the axes it does not mention."""
    label, kind = str(entry.get(name, "?")), {"method": "row", "name": "column"}[name]
    own = read_grid(entry.get("grid", {}), f"the grid of {kind} {label!r}{of}")
    brings = {axis for axis, values in own.axes.items() if any(value.brings for value in values)}
    if useless := [axis for axis in own.axes if axis not in brings and not _takes(entry, axis)]:
        raise ConfigError(_unused(useless[0], [entry], own.where))
    together = [set(group) for group in own.zipped + shared.zipped]
    plain = {key: value for key, value in entry.items() if key != "grid"}
    free = shared.without([axis for axis in shared.axes if not _takes(entry, axis)])
    if twice := [axis for axis in free.axes if axis in own.axes]:
        raise ConfigError(f"{own.where} and [grid] both have the axis {twice[0]!r}.")
    for first in own.points():
        for second in free.points():
            point = first | second
            yield point, _at(plain, name, point, together)


def _at(entry: Entry, name: str, point: Mapping[str, Value], together: Sequence[set[str]]) -> dict[str, Any]:
    found = dict(entry)
    for value in point.values():
        for key, brought in value.brings.items():
            if key == "set":
                found["set"] = [*found.get("set", ()), *brought]
            elif isinstance(brought, Mapping) and isinstance(found.get(key), Mapping):
                found[key] = {**found[key], **brought}
            else:
                found[key] = brought
    shown = {axis for axis in point if f"{{{axis}}}" in str(found.get(name, "")) + str(found.get("group", ""))}
    shown |= {axis for group in together if group & shown for axis in group}
    untold = [f"{axis}={{{axis}}}" for axis in point if axis not in shown]
    found[name] = ", ".join([str(found.get(name, "")), *untold])
    used = [axis for axis in point if _is_written(entry, axis)]
    found = _filled(found, point)
    for axis, value in point.items():
        if axis in used or value.brings:
            continue
        if _is_setting(axis):
            found["set"] = [*found.get("set", ()), f"{axis}={value.text}"]
        else:
            found["objective"] = _with_option(found["objective"], axis, value.text)
    return found


def _with_bases(rows: Sequence[tuple[Entry, Mapping[str, Value], Entry]], base: object) -> Iterator[Entry]:
    """Yield multiplied-out rows with their bases. A base with a grid too is the one with the row's own values."""
    families: dict[object, list[tuple[Mapping[str, Value], str]]] = defaultdict(list)
    for row, point, new in rows:
        label, of = (row_label(str(each.get("method")), each.get("group")) for each in (new, row))
        families[of].append((point, label))
    by_values: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    for _, point, new in rows:
        wanted = new.get("base", base)
        if isinstance(wanted, str) and wanted in families:
            axes = sorted(point.keys() & families[wanted][0][0].keys())
            if (wanted, *axes) not in by_values:
                texts = [tuple(other[axis].text for axis in axes) for other, _ in families[wanted]]
                labels = [label for _, label in families[wanted]]
                by_values[wanted, *axes] = dict(zip(reversed(texts), reversed(labels), strict=True))
            wanted = by_values[wanted, *axes].get(tuple(point[axis].text for axis in axes), wanted)
        if wanted is not None:
            new = {**new, "base": wanted}
        yield new


def read_grid(raw: object, where: str) -> Grid:
    """Check and read a grid as a file has it."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is a table of axes, such as temperature = [0.1, 0.5].")
    axes = {axis: _values(values, axis, where) for axis, values in raw.items() if axis not in ("zip", "exclude")}
    zipped = _read_zip(raw.get("zip", ()), axes, where)
    for axis, values in axes.items():
        texts = Counter(value.text for value in values)
        if (twice := [text for text in texts if texts[text] > 1]) and not any(axis in group for group in zipped):
            raise ConfigError(f"{where}: the axis {axis!r} has the value {twice[0]} twice.")
    grid = Grid(where, axes, zipped, _read_exclude(raw.get("exclude", ()), axes, where))
    if axes and next(grid.points(), None) is None:
        raise ConfigError(f"{where}: exclude leaves nothing.")
    return grid


def _read_zip(zipped: object, axes: Axes, where: str) -> tuple[tuple[str, ...], ...]:
    if not isinstance(zipped, list | tuple) or not all(isinstance(group, list | tuple) for group in zipped):
        raise ConfigError(f'{where}: zip is a list of lists of axes that walk together, such as [["batch", "rate"]].')
    named = Counter(axis for group in zipped for axis in group)
    for axis, count in named.items():
        _known(axis, axes, f"{where}: zip")
        if count > 1:
            raise ConfigError(f"{where}: zip names the axis {axis!r} twice.")
    for group in zipped:
        if len({len(axes[axis]) for axis in group}) > 1:
            sizes = ", ".join(f"{axis} {len(axes[axis])}" for axis in group)
            raise ConfigError(f"{where}: axes that are zipped have as many values each, not {sizes}.")
    return tuple(map(tuple, zipped))


def _read_exclude(excluded: object, axes: Axes, where: str) -> tuple[Mapping[str, tuple[str, ...]], ...]:
    if not isinstance(excluded, list | tuple) or not all(isinstance(out, Mapping) and out for out in excluded):
        raise ConfigError(f"{where}: exclude is a list of points to leave out, such as [{{ batch = 256 }}].")
    found: list[Mapping[str, tuple[str, ...]]] = []
    for out in excluded:
        texts: dict[str, tuple[str, ...]] = {}
        for axis, value in out.items():
            _known(axis, axes, f"{where}: exclude")
            if not isinstance(value, list | tuple):
                value = [value]
            texts[axis] = tuple(map(_text, value))
            known = [each.text for each in axes[axis]]
            if odd := [text for text in texts[axis] if text not in known]:
                raise ConfigError(f"{where}: exclude: {odd[0]!r} is no value of {axis}.{nearest(odd[0], known)}")
        found.append(texts)
    return tuple(found)


def _values(raw: object, axis: str, where: str) -> tuple[Value, ...]:
    if not isinstance(raw, list | tuple):
        raise ConfigError(f"{where}: the axis {axis!r} is a list of values, got {raw!r}.")
    found = []
    for value in raw:
        if not isinstance(value, Mapping):
            found.append(Value(_text(value), {}))
        elif isinstance(value.get("name"), str):
            found.append(Value(value["name"], {key: each for key, each in value.items() if key != "name"}))
        else:
            raise ConfigError(
                f'{where}: a value of {axis!r} that is a table needs a name, such as {{ name = "a", set = [] }}.'
            )
    if not found:
        raise ConfigError(f"{where}: the axis {axis!r} is empty. Give it values or remove it.")
    return tuple(found)


def _known(axis: object, axes: Entry, what: str) -> None:
    if axis not in axes:
        raise ConfigError(f"{what}: no axis {axis!r}.{nearest(str(axis), axes)} Axes: {', '.join(axes) or 'none'}.")


def _text(value: object) -> str:
    if isinstance(value, bool | list | tuple):
        return json.dumps(value)
    return str(value)


def _filled(value: Any, point: Mapping[str, Value]) -> Any:
    """Replace each {axis} in all texts inside a value."""
    if isinstance(value, str):
        return filled(value, {axis: one.text for axis, one in point.items()})
    if isinstance(value, Mapping):
        return {key: _filled(each, point) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(each, point) for each in value]
    return value


def _is_written(value: Any, axis: str) -> bool:
    if isinstance(value, str):
        return f"{{{axis}}}" in value
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(_is_written(each, axis) for each in value)


def _is_setting(axis: str) -> bool:
    return "." in axis and not axis.startswith("objective.")


def _takes(entry: Entry, axis: str) -> bool:
    """Return whether a row or column uses an axis: in a text, as a setting, or as an option of the objective."""
    return _is_written(entry, axis) or _is_setting(axis) or axis in _options(entry)


def _options(entry: Entry) -> dict[str, None]:
    """Return the names by which an axis changes an objective: OPTION, objective.TERM.OPTION, objective.TERM.weight."""
    found: dict[str, None] = {}
    for term in _terms(entry.get("objective")):
        names = [option.name for option in registry.get(term.name).options]
        found |= dict.fromkeys(names)
        found |= dict.fromkeys(f"objective.{term.name}.{name}" for name in [*names, "weight"])
    return found


def _terms(text: object) -> list[Term]:
    """Return the terms of an objective, none if it cannot be read. Building it reports the error."""
    if not isinstance(text, str) or text == "none":
        return []
    try:
        terms = parse(text)
        for term in terms:
            registry.get(term.name)
    except (SpecError, RegistryError):
        return []
    return terms


def _with_option(text: str, axis: str, value: str) -> str:
    """Set an option or a weight of an objective to a value."""
    owner, _, option = axis.removeprefix("objective.").rpartition(".")
    terms = []
    for term in _terms(text):
        has = option == "weight" or any(each.name == option for each in registry.get(term.name).options)
        if has and owner in ("", term.name):
            read = dict(parse(f"x(y={value})")[0].options)["y"]
            if option == "weight" and (isinstance(read, bool) or not isinstance(read, int | float)):
                raise ConfigError(f"[grid] {axis}: a weight is a number, got {value!r}.")
            term = changed(term, option, read)
        terms.append(term)
    return format_terms(terms)


def changed(term: Term, option: str, value: Any) -> Term:
    if option == "weight":
        return replace(term, weight=float(value))
    return replace(term, options=tuple((dict(term.options) | {option: value}).items()))


def _unused(axis: str, entries: Sequence[Entry], where: str) -> str:
    known = dict.fromkeys(option for entry in entries for option in _options(entry))
    return (
        f"{where}: nothing uses the axis {axis!r}.{nearest(axis, known)} An axis is a setting (train.batch_size), "
        f"an option of an objective ({', '.join(list(known)[:3]) or 'none here'}, ...), or {{{axis}}} in a text."
    )


def _are_entries(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
