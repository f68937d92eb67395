"""Every public name says what it is."""

import public
import pytest


def test_every_public_name_has_a_docstring_with_a_sentence() -> None:
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sentence_transformers")
    assert public.undocumented() == []
    assert public.unexplained() == []


def test_what_packages_export_and_what_pages_import_is_public() -> None:
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sentence_transformers")
    names = public.public_names()
    assert names["dipole.objective"][0] == "dipole.core.contrast.objective.objective"
    assert {"dipole.text.ContrastiveLoss", "dipole.rl.ContrastiveSAC", "dipole.Pairs"} <= set(names)
    assert "dipole.core.conformance.kit.parametrize_with_checks" in names  # docs/conformance.md imports it
    assert "dipole.__version__" not in names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("One sentence.", True),
        ("One that goes on\nin a second line.", True),
        ("", False),
        ("TODO", False),
        ("x", False),
    ],
)
def test_what_counts_as_a_sentence(text: str, told: bool) -> None:
    def function() -> None: ...

    function.__doc__ = text
    assert public.has_sentence(function) is told


def test_an_argument_that_no_docstring_names_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        """Args:
        width: known.
        """

    class Thing(Base):
        """A thing of some height."""

        def __init__(self, width: int, height: int, depth: int, *rest: int) -> None: ...

    monkeypatch.setattr(public, "public_names", lambda: {"thing": ("thing", Thing)})
    assert public.unexplained() == ["thing(depth)"]


def test_a_method_without_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        """A thing."""

        def said(self) -> None:
            """Says something."""

        def unsaid(self) -> None: ...

        def _private(self) -> None: ...

    monkeypatch.setattr(public, "public_names", lambda: {"thing": ("thing", Thing)})
    assert public.undocumented() == ["thing.unsaid"]
