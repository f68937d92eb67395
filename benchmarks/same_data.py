"""Were runs that are compared measured on the same data? A record says by a fingerprint what it was measured on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from dipole.core.record import RunRecord


def strangers(known: Iterable[RunRecord], more: Iterable[RunRecord] = ()) -> dict[str, str]:
    """Runs of `more` whose data are not those of `known`, or of `known` alone those of the smaller part: run -> why.

    Data of one name and size are the same for every run of a seed. Where they do not depend on the seed, as several of
    `known` show, they are the same for every seed.
    """
    trusted, newer = list(known), list(more)
    by_seed: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in trusted:
        by_seed[_name(record), record.seed][_fingerprint(record)].append(record.hash)
    found: dict[str, str] = {}
    of_name: dict[str, list[str]] = defaultdict(list)
    for (name, _), prints in by_seed.items():
        usual = max(prints, key=lambda each: len(prints[each]))
        of_name[name].append(usual)
        for odd in prints.keys() - {usual}:
            found |= dict.fromkeys(prints[odd], _why(odd, usual))
    if not newer:
        return found
    found = {}
    for record in newer:
        name, own = _name(record), _fingerprint(record)
        seeds = of_name.get(name, [])
        if of_seed := by_seed.get((name, record.seed)):
            wanted = next(iter(of_seed))
        elif len(seeds) > 1 and len(set(seeds)) == 1:
            wanted = seeds[0]
        else:
            continue
        if own != wanted:
            found[record.hash] = _why(own, wanted)
    return found


def _name(record: RunRecord) -> str:
    return json.dumps([record.domain, record.data.get("name"), record.data.get("sizes")], sort_keys=True, default=str)


def _fingerprint(record: RunRecord) -> str:
    return str(record.data.get("fingerprint"))


def _why(own: str, other: str) -> str:
    return f"was measured on other data (fingerprint {own[:12]}) than the runs beside it ({other[:12]})"
