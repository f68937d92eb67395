"""The registry of objectives, regularizers and diagnostics.

Entries come from three places: the packages `losses` and `regularizers`, `@register(...)` in user code, and packages
that declare the entry-point group `dipole.objectives`. Importing the module of an entry point registers its entries.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from numbers import Real
from threading import RLock
from typing import Any, Literal, TypeVar, get_args

from dipole.core.objectives.spec import Option, options_of
from dipole.core.utils import plugins
from dipole.core.utils.errors import RegistryError, SpecError, nearest
from dipole.core.utils.text import shown

Kind = Literal["objective", "regularizer", "diagnostic"]
Target = TypeVar("Target", bound=Callable[..., Any])
_METHODS = ("simclr", "moco", "cmc", "clip", "curl", "cpc")  # their loss is infonce
_OWN = ("dipole.core.objectives.losses", "dipole.core.objectives.regularizers")


@dataclass(frozen=True)
class Entry:
    """One registered name with its metadata, as in `Registry.register`.

    Args:
        name: the registered name.
        target: the class or function.
        kind: "objective", "regularizer" or "diagnostic".
        summary: one sentence.
        formula: the equation in ASCII.
        source: the paper and the equation number.
        cost: time and memory of one evaluation.
        weight: the default weight of a term, >= 0.
        aliases: other names.
        deviations: paper -> differences from the paper, and choices where the paper leaves them open.
    """

    name: str
    target: Callable[..., Any]
    kind: Kind
    summary: str
    formula: str
    source: str
    cost: str
    weight: float
    aliases: tuple[str, ...] = ()
    deviations: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def package(self) -> str:
        """The package of the entry: "dipole", the name and version of a plug-in, or "" for a user's script."""
        return plugins.declared_by(self.target.__module__)

    @property
    def options(self) -> tuple[Option, ...]:
        """Keywords that a text may give, read from the signature."""
        return options_of(self.target)

    @property
    def defaults(self) -> dict[str, Any]:
        """Option names and their default values."""
        return {option.name: option.default for option in self.options}


def canonical_name(name: str) -> str:
    """Return a name in lower case with underscores: `Align-Uniform` becomes `align_uniform`."""
    return name.lower().replace("-", "_")


class Registry:
    """A table from names to entries. Each name can be registered once."""

    def __init__(self) -> None:
        # By each name and alias. Undo the entries of a plug-in whose import fails.
        self._entries: dict[str, Entry] = plugins.undoable(lambda entry: str(entry.target.__module__))
        self._broken: dict[str, plugins.PluginError] = {}
        self._loaded = False
        self._lock = RLock()  # another thread waits until everything is there

    def register(
        self,
        name: str,
        *,
        kind: Kind = "objective",
        summary: str = "",
        formula: str = "",
        source: str = "",
        cost: str = "one pass over the similarity matrix; memory linear in the number of rows",
        weight: float = 1.0,
        aliases: tuple[str, ...] = (),
        deviations: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Callable[[Target], Target]:
        """Decorate a class or function to make it known under `name`.

        Args:
            name: the name in objective strings: letters, digits and underscores. Upper case becomes lower case, and
                hyphens become underscores.
            kind: "objective" (a base loss), "regularizer" (added with a weight) or "diagnostic" (a measurement).
            summary: one sentence. The default is the first line of the docstring.
            formula: the equation in ASCII.
            source: the paper and the equation number.
            cost: time and memory of one evaluation.
            weight: the default weight of a term (the paper's lambda for a regularizer), finite and >= 0.
            aliases: other names for the same entry.
            deviations: paper -> differences from the paper, and choices where the paper leaves them open. Use () for a
                paper without differences.

        Returns:
            A decorator that returns the class or function unchanged.

        Raises:
            RegistryError: from the decorator. A name or alias is not an identifier or belongs to another class, or
                `kind` or `weight` is invalid.

        Example:
            >>> @dipole.register("attraction", summary="Pull positives together.", formula="1 - cos(z, z')")
            ... class Attraction(dipole.Objective):
            ...     def __init__(self):
            ...         super().__init__("cosine")
            ...     def loss(self, positive, rows):
            ...         return rows.over_positives(1 - positive)
            >>> objective = dipole.objective("attraction + 0.1*dp")
        """
        if not isinstance(name, str):
            raise RegistryError(f"register takes a name first, as in @dipole.register('mine'), got {shown(name)}.")
        if isinstance(aliases, str):
            raise RegistryError(f"cannot register {name!r}: aliases must be a tuple of names, got {aliases!r}.")

        def decorate(target: Target) -> Target:
            if not (callable(target) and hasattr(target, "__qualname__")):
                raise RegistryError(f"cannot register {name!r}: it must be a class or a function, got {shown(target)}.")
            doc = inspect.getdoc(target) or ""
            entry = Entry(
                name=canonical_name(name),
                target=target,
                kind=kind,
                summary=summary or doc.split("\n", 1)[0],
                formula=formula,
                source=source,
                cost=cost,
                weight=weight,
                aliases=tuple(canonical_name(alias) for alias in aliases),
                deviations=deviations or {},
            )
            self._add(entry)
            return target

        return decorate

    def _add(self, entry: Entry) -> None:
        place = f"{entry.target.__module__}.{entry.target.__qualname__}"
        refused = f"cannot register {entry.name!r} ({place}):"
        if entry.kind not in get_args(Kind):
            allowed = ", ".join(map(repr, get_args(Kind)))
            raise RegistryError(f"{refused} kind must be one of {allowed}, got {entry.kind!r}.")
        if not isinstance(entry.weight, Real) or not 0 <= entry.weight < inf:
            raise RegistryError(f"{refused} weight must be a finite number >= 0, got {entry.weight!r}.")
        if not isinstance(entry.deviations, Mapping):
            raise RegistryError(f"{refused} deviations must be a dictionary by paper, got {shown(entry.deviations)}.")
        for name in (entry.name, *entry.aliases):
            if not name.isidentifier():
                raise RegistryError(f"cannot register {name!r} ({place}): a name is letters, digits and underscores.")
            taken = self._entries.get(name)
            if taken and (owner := f"{taken.target.__module__}.{taken.target.__qualname__}") != place:
                # A name of dipole's own stays, whichever of the two was imported first.
                first, other = sorted((owner, place), key=lambda each: not each.startswith("dipole."))
                raise RegistryError(
                    f"{name!r} is already registered by {first}; {other} needs another name (or drop one of the two "
                    "packages)."
                )
        for name in [name for name, former in self._entries.items() if former.name == entry.name]:
            del self._entries[name]
        self._entries.update(dict.fromkeys((entry.name, *entry.aliases), entry))

    def _load(self) -> None:
        """Import all entries once. A failure in one of dipole's own modules is raised again at each call."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True  # its own modules may ask for entries while they are imported
            try:
                for module in _OWN:
                    import_module(module)
                self._broken = {}
                for point in plugins.points("objectives"):
                    if plugins.is_ours(point):
                        point.load()
                        continue
                    try:
                        plugins.load(point)
                    except plugins.PluginError as error:  # `get` reports it to who asks for its name
                        self._broken[canonical_name(point.name)] = error
            except BaseException:
                self._loaded = False
                raise

    def get(self, name: str) -> Entry:
        """Return the entry of a name or alias.

        Args:
            name: upper case and hyphens are allowed, as in `register`.

        Raises:
            SpecError: there is no such entry. The message lists the nearest name and all names.
        """
        self._load()
        key = canonical_name(name)
        if key in self._entries:
            return self._entries[key]
        if key in self._broken:
            raise SpecError(f"the plug-in {self._broken[key]}")
        # Report broken plug-ins first: one of them may define this name.
        absent = [f"\nA plug-in that cannot be used: {error}\n" for error in self._broken.values()]
        if plugins.switched_off():
            absent.append(f" Plug-ins are switched off ({plugins.SWITCH}=none).")
        # Diagnostics are no terms of an objective.
        terms = {alias: entry.name for alias, entry in self._entries.items() if entry.kind != "diagnostic"}
        near = nearest(key, terms)
        if key.startswith(_METHODS):
            near = " It is a method: its loss is 'infonce', and `dipole list recipes` has its recipes."
        known = ", ".join(sorted(set(terms.values())))
        raise SpecError(f"unknown name {shown(name)}.{''.join(absent)}{near} Known: {known}.")

    def names(self) -> dict[str, Kind]:
        """Return every name and alias with the kind of its entry."""
        self._load()
        return {alias: entry.kind for alias, entry in self._entries.items()}

    def name_of(self, target: Callable[..., Any]) -> str | None:
        """Return the registered name of a class or function, or None.

        Args:
            target: the class or function itself.
        """
        return next((entry.name for entry in self._entries.values() if entry.target is target), None)

    def entries(self, kind: Kind | None = None) -> list[Entry]:
        """Return all entries, or those of one kind, in order of registration.

        Args:
            kind: "objective", "regularizer" or "diagnostic". None returns all.
        """
        self._load()
        return [entry for alias, entry in self._entries.items() if alias == entry.name and kind in (None, entry.kind)]

    @property
    def broken(self) -> dict[str, plugins.PluginError]:
        """The errors of plug-ins that failed to load, by the name of their entry point."""
        self._load()
        return dict(self._broken)

    @contextmanager
    def temporary(self) -> Iterator["Registry"]:
        """Remove all entries that are registered inside the block when it ends."""
        self._load()
        before = dict(self._entries)
        try:
            yield self
        finally:
            self._entries.clear()
            self._entries.update(before)


registry = Registry()
register = registry.register


@functools.cache
def timed(after_step: Callable[..., None]) -> tuple[str, ...]:
    """Return which of `step` and `total` an `after_step` accepts."""
    parameters = inspect.signature(after_step).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return tuple(name for name in ("step", "total") if takes_all or name in parameters)


def entry_of(term: Any) -> Entry:
    """Return the registry entry of a term's class. Raises SpecError if the class is not registered."""
    return registry.get(term.registered_name())
