"""`dipole list`: every name one can write in a recipe or an objective."""

from __future__ import annotations

import argparse
import json
import tomllib
from typing import Any

from dipole.core.cli import Runner

DOMAIN_SUMMARIES = {
    "vision": "images: SimCLR, CMC, MoCo-v2 and SwAV, with probes on the frozen encoder",
    "text": "sentences: Quick Thoughts and block contrast, with the SentEval tasks",
    "rl": "agents that see pixels: SAC with a contrastive objective (CURL)",
}
KINDS = ("objectives", "regularizers", "diagnostics", "recipes", "suites", "domains")


def configure(parser: argparse.ArgumentParser) -> Runner:
    parser.add_argument(
        "kind", nargs="?", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: kind -> list of entries")
    return run


def run(arguments: argparse.Namespace) -> int:
    found = {kind: list_kind(kind) for kind in ([arguments.kind] if arguments.kind else KINDS)}
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for kind, entries in found.items():
        print(f"{kind}:")
        width = max((len(entry["name"]) for entry in entries), default=0)
        for entry in entries:
            print(f"  {entry['name']:<{width}}  {entry['summary']}")
        if not entries:
            print("  (none)")
    return 0


def list_kind(kind: str) -> list[dict[str, Any]]:
    """Return name, summary and what else is known of each entry of a kind."""
    if kind == "recipes":
        return _recipes()
    if kind == "suites":
        return _suites()
    if kind == "domains":
        from dipole.core.train.domains import DOMAINS

        return [
            {"name": name, "summary": DOMAIN_SUMMARIES.get(name, target), "adapter": target}
            for name, target in DOMAINS.items()
        ]
    from dipole.core.contrast.registry import Kind, registry

    kinds: dict[str, Kind] = {"objectives": "objective", "regularizers": "regularizer", "diagnostics": "diagnostic"}
    return [
        {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "summary": entry.summary,
            "source": entry.source,
            "weight": entry.weight,
        }
        for entry in registry.entries(kinds[kind])
    ]


def _recipes() -> list[dict[str, Any]]:
    from dipole.core.train.shipped import shipped_recipes

    entries = []
    for name, path in shipped_recipes().items():
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
        summary = recipe.get("description", "")
        entries.append({"name": name, "summary": summary, "domain": recipe.get("domain"), "path": str(path)})
    return entries


def _suites() -> list[dict[str, Any]]:
    from dipole.core.train.shipped import shipped

    entries = []
    for name, path in shipped("suites").items():
        suite = tomllib.loads(path.read_text(encoding="utf-8"))
        entries.append({"name": name, "summary": suite["title"], "scales": list(suite["scale"]), "path": str(path)})
    return entries
