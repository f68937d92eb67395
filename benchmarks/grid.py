"""Grids: rows and columns of a suite written as axes, and multiplied out before the suite is read.

    [grid]                                  # every row, at every value that it can take
    temperature = [0.1, 0.2, 0.5]           # an option of its objective, or objective.TERM.OPTION
    "train.batch_size" = [64, 256]          # a setting

    [[columns]]                             # a grid of one row or column; {axis} stands for a value in any of its texts
    name = "{data}/batch={batch}"
    metric = "linear/accuracy"
    set = ["train.batch_size={batch}", "train.learning_rate={rate}"]
    [columns.grid]
    data = [
        { name = "CIFAR-10", set = ["vision.data.source=cifar10"] },
        { name = "STL-10", set = ["vision.data.source=stl10"] },
    ]
    batch = [64, 128, 256]
    rate = [0.03, 0.06, 0.12]
    zip = [["batch", "rate"]]               # walk together. The other axes are multiplied, the first one slowest
    exclude = [{ data = "STL-10", batch = 256 }]

A value that is a table has a name, and what else it has goes into the row or column, `set` behind its own. `[row]` and
`[column]` are what every row and column has that says nothing else.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import Term, format_terms, parse
from dipole.core.utils.errors import ConfigError, RegistryError, SpecError, nearest

MOST = 100_000
"""Rows, columns, or cells of a suite: more is taken for a mistake."""
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """One value of an axis: its text, and what it brings along."""

    text: str
    brings: Entry


@dataclass(frozen=True)
class Grid:
    """Axes by name, those that walk together, and what is left out (axis -> texts)."""

    where: str
    axes: Mapping[str, tuple[Value, ...]]
    zipped: tuple[tuple[str, ...], ...] = ()
    excluded: tuple[Mapping[str, tuple[str, ...]], ...] = ()

    def points(self) -> Iterator[dict[str, Value]]:
        """Every point that is not left out, the first axis slowest."""
        groups = self._groups()
        count = prod(len(self.axes[group[0]]) for group in groups)
        if count > MOST:
            sizes = " x ".join(str(len(self.axes[group[0]])) for group in groups)
            raise ConfigError(f"{self.where} has {count:,} points ({sizes}); at most {MOST:,} are multiplied out.")
        for places in product(*(range(len(self.axes[group[0]])) for group in groups)):
            point = {axis: self.axes[axis][i] for group, i in zip(groups, places, strict=True) for axis in group}
            if not any(all(point[axis].text in texts for axis, texts in out.items()) for out in self.excluded):
                yield point

    def _groups(self) -> list[tuple[str, ...]]:
        together = {axis: group for group in self.zipped for axis in group}
        return list(dict.fromkeys(together.get(axis, (axis,)) for axis in self.axes))

    def without(self, left_out: Sequence[str]) -> "Grid":
        """The grid of the other axes."""
        kept = {axis: values for axis, values in self.axes.items() if axis not in left_out}
        zipped = tuple(left for group in self.zipped if (left := tuple(axis for axis in group if axis in kept)))
        return replace(
            self, axes=kept, zipped=zipped, excluded=tuple(e for e in self.excluded if e.keys() <= kept.keys())
        )


def expand(suite: Entry) -> dict[str, Any]:
    """A suite as its file has it, with every grid multiplied out and no grid left.

    Raises:
        ConfigError: an axis is empty or unused, or there are too many points.
    """
    found = {key: value for key, value in suite.items() if key not in ("grid", "row", "column")}
    shared = read_grid(suite.get("grid", {}), "[grid]")
    scales = found.get("scale", {})
    bad = [name for name in ("row", "column") if not isinstance(suite.get(name, {}), Mapping)]
    if bad:
        raise ConfigError(f"[{bad[0]}] is a table: what every {bad[0]} has that says nothing else.")
    if isinstance(scales, Mapping):
        found["scale"] = {
            name: _expanded(scale, suite, shared, f" of scale {name!r}") if isinstance(scale, Mapping) else scale
            for name, scale in scales.items()
        }
    return _expanded(found, suite, shared, "")


def _expanded(part: Entry, suite: Entry, shared: Grid, of: str) -> dict[str, Any]:
    """A suite or a scale of it, with its rows and columns multiplied out."""
    found = dict(part)
    if _are_entries(part.get("columns")):
        columns = [{**suite.get("column", {}), **column} for column in part["columns"]]
        found["columns"] = [new for column in columns for _, new in _multiplied(column, "name", None, of)]
    if _are_entries(part.get("rows")):
        rows = [{**suite.get("row", {}), **row} for row in part["rows"]]
        useless = [axis for axis in shared.axes if not any(_takes(row, axis) for row in rows)]
        if useless:
            raise ConfigError(_nobody_takes(useless[0], rows, shared.where))
        pairs = [(row, point, new) for row in rows for point, new in _multiplied(row, "method", shared, of)]
        found["rows"] = [new for _, _, new in pairs]
        if shared.axes:
            families = _Families(pairs)
            found["rows"] = [families.with_base(new, point, suite.get("base")) for _, point, new in pairs]
            found.pop("base", None)  # each row names its own
    return found


def _multiplied(
    entry: Entry, name: str, shared: Grid | None, of: str
) -> Iterator[tuple[dict[str, Value], dict[str, Any]]]:
    """An entry at each point of its own grid and of the shared one. Axes not in its name are written behind it."""
    label = str(entry.get(name, "?"))
    own = read_grid(entry.get("grid", {}), f"the grid of {'row' if name == 'method' else 'column'} {label!r}{of}")
    if useless := [axis for axis in own.axes if not _takes(entry, axis) and not _brings(own.axes[axis])]:
        raise ConfigError(_nobody_takes(useless[0], [entry], own.where))
    together = [set(group) for group in own.zipped + (shared.zipped if shared else ())]
    plain = {key: value for key, value in entry.items() if key != "grid"}
    free = None if shared is None else shared.without([axis for axis in shared.axes if not _takes(entry, axis)])
    if free and (twice := [axis for axis in free.axes if axis in own.axes]):
        raise ConfigError(f"{own.where} and [grid] both have the axis {twice[0]!r}.")
    for first in own.points():
        for second in free.points() if free else ({},):
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


class _Families:
    """Labels of the rows that each row as it is written is multiplied out to, by the values of their points."""

    def __init__(self, rows: Sequence[tuple[Entry, Mapping[str, Value], Entry]]) -> None:
        self._points: dict[object, list[tuple[Mapping[str, Value], str]]] = defaultdict(list)
        for row, point, new in rows:
            self._points[_label(row)].append((point, _label(new)))
        self._axes = {
            label: frozenset.intersection(*(frozenset(point) for point, _ in points))
            for label, points in self._points.items()
        }
        self._by_values: dict[tuple[object, frozenset[str]], dict[tuple[str, ...], str]] = {}

    def with_base(self, row: Entry, point: Mapping[str, Value], base: object) -> dict[str, Any]:
        """The row with its base: the one of its own values, where the base it names is multiplied out as well."""
        wanted = row.get("base", base)
        shared = frozenset(point) & self._axes.get(wanted, frozenset())
        if (wanted, shared) not in self._by_values:
            labels: dict[tuple[str, ...], str] = {}
            for other, label in self._points.get(wanted, ()):
                labels.setdefault(_texts(other, shared), label)
            self._by_values[wanted, shared] = labels
        return {**row, "base": self._by_values[wanted, shared].get(_texts(point, shared), wanted)}


def _texts(point: Mapping[str, Value], axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(point[axis].text for axis in sorted(axes))


def read_grid(raw: object, where: str) -> Grid:
    """The axes of a grid as a file has it."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is a table of axes, such as temperature = [0.1, 0.5].")
    axes = {axis: _values(values, axis, where) for axis, values in raw.items() if axis not in ("zip", "exclude")}
    zipped = raw.get("zip", ())
    if not isinstance(zipped, list | tuple) or not all(isinstance(group, list | tuple) for group in zipped):
        raise ConfigError(f'{where}: zip is a list of lists of axes that walk together, such as [["batch", "rate"]].')
    for axis in [axis for group in zipped for axis in group]:
        _known(axis, axes, f"{where}: zip")
    if twice := [a for group in zipped for a in group if sum(list(other).count(a) for other in zipped) > 1]:
        raise ConfigError(f"{where}: zip names the axis {twice[0]!r} twice.")
    for group in zipped:
        if len({len(axes[axis]) for axis in group}) > 1:
            sizes = ", ".join(f"{axis} {len(axes[axis])}" for axis in group)
            raise ConfigError(f"{where}: axes that are zipped have as many values each, not {sizes}.")
    for axis, values in axes.items():
        texts = [value.text for value in values]
        if (twice := [t for t in texts if texts.count(t) > 1]) and not any(axis in group for group in zipped):
            raise ConfigError(f"{where}: the axis {axis!r} has the value {twice[0]} twice.")
    excluded = raw.get("exclude", ())
    if not isinstance(excluded, list | tuple) or not all(isinstance(out, Mapping) and out for out in excluded):
        raise ConfigError(f"{where}: exclude is a list of points to leave out, such as [{{ batch = 256 }}].")
    left_out: list[Mapping[str, tuple[str, ...]]] = []
    for out in excluded:
        texts_out: dict[str, tuple[str, ...]] = {}
        for axis, value in out.items():
            _known(axis, axes, f"{where}: exclude")
            texts_out[axis] = tuple(map(_text, value if isinstance(value, list | tuple) else [value]))
            known = [each.text for each in axes[axis]]
            if odd := [text for text in texts_out[axis] if text not in known]:
                raise ConfigError(f"{where}: exclude: {odd[0]!r} is no value of {axis}.{nearest(odd[0], known)}")
        left_out.append(texts_out)
    grid = Grid(where, axes, tuple(map(tuple, zipped)), tuple(left_out))
    if axes and next(grid.points(), None) is None:
        raise ConfigError(f"{where}: exclude leaves nothing.")
    return grid


def _values(raw: object, axis: str, where: str) -> tuple[Value, ...]:
    if not isinstance(raw, list | tuple):
        raise ConfigError(f"{where}: the axis {axis!r} is a list of values, got {raw!r}.")
    if any(isinstance(value, Mapping) and not isinstance(value.get("name"), str) for value in raw):
        raise ConfigError(
            f'{where}: a value of {axis!r} that is a table needs a name, such as {{ name = "a", set = [] }}.'
        )
    found = [
        Value(value["name"], {key: each for key, each in value.items() if key != "name"})
        if isinstance(value, Mapping)
        else Value(_text(value), {})
        for value in raw
    ]
    if not found:
        raise ConfigError(f"{where}: the axis {axis!r} is empty; give it values or take it away.")
    return tuple(found)


def _known(axis: object, axes: Entry, what: str) -> None:
    if axis not in axes:
        raise ConfigError(f"{what}: no axis {axis!r}.{nearest(str(axis), axes)} Axes: {', '.join(axes) or 'none'}.")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | tuple) else str(value)


def _filled(value: Any, point: Mapping[str, Value]) -> Any:
    """Every text inside with each {axis} replaced."""
    if isinstance(value, str):
        for axis, one in point.items():
            value = value.replace(f"{{{axis}}}", one.text)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(each, point) for key, each in value.items()}
    return [_filled(each, point) for each in value] if isinstance(value, list | tuple) else value


def _is_written(value: Any, axis: str) -> bool:
    if isinstance(value, str):
        return f"{{{axis}}}" in value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(_is_written(each, axis) for each in inner)


def _brings(values: Sequence[Value]) -> bool:
    return any(value.brings for value in values)


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
    """Return the terms of an objective, none if it cannot be read: building it reports the error."""
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
    """An objective with an option, or a weight, set to a value."""
    owner, _, option = axis.removeprefix("objective.").rpartition(".")
    terms = []
    for term in _terms(text):
        has = option == "weight" or any(each.name == option for each in registry.get(term.name).options)
        if has and owner in ("", term.name):
            read = dict(parse(f"x(y={value})")[0].options)["y"]
            if option == "weight":
                if isinstance(read, bool) or not isinstance(read, int | float):
                    raise ConfigError(f"[grid] {axis}: a weight is a number, got {value!r}.")
                term = replace(term, weight=float(read))
            else:
                term = replace(term, options=tuple((dict(term.options) | {option: read}).items()))
        terms.append(term)
    return format_terms(terms)


def _nobody_takes(axis: str, entries: Sequence[Entry], where: str) -> str:
    known = dict.fromkeys(option for entry in entries for option in _options(entry))
    return (
        f"{where}: nothing takes the axis {axis!r}.{nearest(axis, known)} An axis is a setting (train.batch_size), an "
        f"option of an objective ({', '.join(list(known)[:3]) or 'none here'}, ...), or stands as {{{axis}}} in a text."
    )


def _label(row: Entry) -> str:
    return f"{row.get('method')} / {row['group']}" if row.get("group") else str(row.get("method"))


def _are_entries(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
