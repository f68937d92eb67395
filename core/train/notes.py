"""Terms that stay 0: what an objective notes about them (`TermValue.note`), collected over a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TermNotes:
    """Keeps the note of each term that has had the same one at every step since the beginning of the run."""

    def __init__(self) -> None:
        self._steady: dict[str, str] | None = None
        self._said: set[str] = set()

    def see(self, terms: Mapping[str, Any]) -> None:
        """Look at the terms of one step (`Outcome.terms`); their notes are text, nothing waits for the device."""
        if self._steady is None:
            self._steady = {name: term.note for name, term in terms.items() if term.note}
        elif self._steady:
            self._steady = {
                name: note for name, note in self._steady.items() if name in terms and terms[name].note == note
            }

    @property
    def lines(self) -> list[str]:
        """A sentence per term that has taught nothing so far."""
        return [f"the term {name!r} has been {note}, at every step" for name, note in (self._steady or {}).items()]

    def unsaid(self) -> list[str]:
        """Those sentences that were not handed out before."""
        new = [line for line in self.lines if line not in self._said]
        self._said.update(new)
        return new

    def state_dict(self) -> dict[str, Any]:
        return {"steady": self._steady}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steady = state["steady"]
        if steady is not None and not all(isinstance(each, str) for pair in steady.items() for each in pair):
            raise ValueError("'notes' are not what a run writes")
        self._steady = steady
