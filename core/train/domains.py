"""Domains by name: those of dipole and of any installed package, found by the entry-point group `dipole.domains`.

    [project.entry-points."dipole.domains"]
    mine = "my_package.domain:DOMAIN"

The entry point names a `Domain` in a module that imports nothing heavy. The domain's adapter is imported when a
recipe needs it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from dipole.core.objectives.registry import registry
from dipole.core.utils.errors import ConfigError, DipoleError, nearest
from dipole.core.utils.extras import install_line
from dipole.core.utils.plugins import OURS, PluginError, is_ours, load, load_each, package, points, shipped
from dipole.core.utils.text import shortened

__all__ = ["Domain", "add_domain", "temporary_domain"]

if TYPE_CHECKING:
    from dipole.core.train.adapter import Adapter


@dataclass(frozen=True)
class Domain:
    """Description of a domain that needs no import of its adapter.

        >>> rings = Domain("rings", summary="points on two rings", adapter="my_package.adapter:RingsAdapter")

    Args:
        name: the recipe's `domain`, and the name of its table.
        summary: a line for `dipole list domains`.
        adapter: "package.module:Class" of its `Adapter`.
        extra: the extra of its distribution that installs its dependencies, or "".
        probes: checks of `dipole doctor`, title -> "package.module:function". The function returns its result as
            text, or raises a DipoleError "The problem. The fix."
        package: its distribution, filled in by the lookup.
        exported: "package.module:function" that lets `dipole embed` read exported folders, or "". The
            function gets a folder, a torch.device and the name of features or None. It returns an `Embedder`, or None
            if the folder belongs to another domain.
        parts: "package.module:function" that returns further names for `dipole show`, such as frameworks: name ->
            class. Or "".
    """

    name: str
    summary: str
    adapter: str
    extra: str = ""
    probes: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    exported: str = ""
    parts: str = ""

    @property
    def install(self) -> str:
        """Return the command that installs its dependencies."""
        return install_line(self.extra, self.package)


_added: dict[str, Domain] = {}  # by `add_domain`, before those of packages


def add_domain(domain: Domain) -> None:
    """Register a domain in this process, for scripts. Packages declare an entry point instead.

        >>> add_domain(Domain("rings", "points on two rings", adapter="my_module:RingsAdapter"))

    Args:
        domain: takes precedence over others of its name, dipole's own included.

    Raises:
        ConfigError: it is no `Domain`.
    """
    if not isinstance(domain, Domain):
        raise ConfigError(f"add_domain takes a Domain(name, summary, adapter), got {shortened(repr(domain))}.")
    _added[domain.name] = domain


@contextmanager
def temporary_domain(domain: Domain) -> Iterator[None]:
    """Return a context manager that registers a domain inside its block, as `add_domain` does.

    Args:
        domain: takes precedence over others of its name.
    """
    before = dict(_added)
    add_domain(domain)
    try:
        yield
    finally:
        _added.clear()
        _added.update(before)


def domain_names() -> list[str]:
    """Return every name that a recipe can use, without imports."""
    return list(dict.fromkeys([*_added, *(point.name for point in points("domains"))]))


def domains() -> dict[str, Domain]:
    """Return every domain that can be loaded, by name."""
    return load_each("domains", _load)[0] | _added


def broken_domains() -> list[PluginError]:
    """Return the errors of domains that cannot be loaded."""
    return load_each("domains", _load)[1]


def find_domain(name: str) -> Domain:
    """Return the domain of a name. Raise ConfigError if it is unknown or cannot be loaded."""
    if name in _added:
        return _added[name]
    declared = points("domains")
    try:
        for point in declared:
            if point.name == name:
                return _load(point)
    except PluginError as error:
        raise ConfigError(f"the domain {error}") from error
    if not any(map(is_ours, declared)):
        raise ConfigError(
            f"unknown domain {name!r}: not even dipole's own are known, as it is not installed, or was before it "
            "declared them. Install it again: `make`, or `pip install -e .` in a checkout."
        )
    known = domain_names()
    raise ConfigError(f"unknown domain {name!r}.{nearest(name, known)} Allowed: {', '.join(known)}.")


def _load(point: EntryPoint) -> Domain:
    domain = load(point)
    if not isinstance(domain, Domain):
        raise PluginError(
            point, f"it names something of type {type(domain).__name__}, not a dipole.core.train.domains.Domain."
        )
    if domain.name != point.name:
        raise PluginError(point, f"the Domain it names is called {domain.name!r}; both need one name.")
    return replace(domain, package=package(point))


def adapter_class(name: str) -> "type[Adapter]":
    """Import the adapter of a domain. Raise ConfigError if it is unknown or its packages are missing."""
    domain = find_domain(name)
    try:
        return cast("type[Adapter]", resolve_name(domain.adapter))
    except ModuleNotFoundError as error:
        # A missing module of the domain's own is a mistake in it, not a package to install.
        home = domain.adapter.partition(":")[0].partition(".")[0]
        if (error.name or "").partition(".")[0] in (home, "dipole"):
            raise
        raise ConfigError(
            f"domain {name!r} needs the package {error.name!r}. Install it with: {domain.install}"
        ) from error
    except BaseException as error:  # a plug-in may call sys.exit, or raise what derives from no Exception
        if domain.package == OURS or isinstance(error, DipoleError | KeyboardInterrupt):
            raise
        owner = f" of {domain.package}" if domain.package else ""
        raise ConfigError(
            f"the domain {name!r}{owner}: its adapter {domain.adapter!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


# Names of all kinds, so that a message can say what a name is that was given for another kind -------------------------

USE = {
    "objective": "dipole train RECIPE --set objective={name}",
    "regularizer": "dipole train RECIPE --set 'objective=infonce + {name}'",
    "recipe": "dipole train {name}",
    "suite": "dipole bench {name}",
    "framework": "dipole train RECIPE --set {domain}.method={name}",
}
"""How a name of a kind is used. Others are explained by `dipole show`."""


def parts() -> dict[str, tuple[str, type]]:
    """Return names that a domain adds, such as frameworks: name -> domain and class."""
    found: dict[str, tuple[str, type]] = {}
    for domain in domains().values():
        with suppress(DipoleError, ImportError):
            added = resolve_name(domain.parts)() if domain.parts else {}
            found |= {each: (domain.name, part) for each, part in added.items()}
    return found


def kinds() -> dict[str, str]:
    """Return the kind of each name. Of several kinds one counts: objective, recipe, suite, domain, framework."""
    found: dict[str, str] = dict.fromkeys(parts(), "framework") | dict.fromkeys(domain_names(), "domain")
    for kind in ("suite", "recipe"):
        found |= dict.fromkeys(shipped(f"{kind}s"), kind)
    return found | registry.names()


def of_another_kind(name: str) -> str:
    """Return ' It is an objective: dipole train ...' for a name that is no recipe or suite as expected, or ''."""
    kind = kinds().get(name)
    if kind is None:
        return ""
    domain, _ = parts().get(name, ("", None))
    article = "an" if kind == "objective" else "a"
    return f" It is {article} {kind}: {USE.get(kind, 'dipole show {name}').format(name=name, domain=domain)}."
