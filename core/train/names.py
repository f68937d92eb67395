"""Names of all kinds, so that a message can say what a name is that was given for another kind."""

from __future__ import annotations

from contextlib import suppress
from pkgutil import resolve_name

from dipole.core.objectives.registry import registry
from dipole.core.train.domains import domain_names, domains
from dipole.core.train.shipped import shipped
from dipole.core.utils.errors import DipoleError

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
