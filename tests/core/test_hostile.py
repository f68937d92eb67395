"""Whatever a stranger sends as an objective, a setting or a recipe: a value or one short error of ours, and soon."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dipole
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse
from dipole.core.train.recipe import load, parse_override, read_recipe, resolve
from dipole.core.utils.errors import OptionError, SpecError

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import answered, settings_of

MANY = settings_of(36_500, is_quick=False)
FEW = settings_of(300, is_quick=True)

NAMES = [entry.name for entry in registry.entries()]
OPTIONS = sorted({option.name for entry in registry.entries() for option in entry.options})
NUMBERS = st.one_of(
    st.integers(-5, 5),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.just("9" * 4000),
    st.just("1e999"),
    st.just("nan"),
).map(str)
VALUES = st.one_of(
    NUMBERS, st.sampled_from(["true", "none", "learned", "cosine", "'a'", "[", "(1)"]), st.text(max_size=5)
)
OPTION = st.tuples(st.sampled_from([*OPTIONS, "self", "", "temperatur"]), VALUES).map("=".join)
TERM = st.builds(
    lambda weight, name, options: f"{weight}{name}({', '.join(options)})",
    st.one_of(st.just(""), NUMBERS.map(lambda number: f"{number}*")),
    st.one_of(st.sampled_from(NAMES), st.text(max_size=8)),
    st.lists(OPTION, max_size=3),
)
SPEC = st.one_of(st.lists(TERM, min_size=1, max_size=4).map(" + ".join), st.text(max_size=60))


@FEW
@given(SPEC)
def test_objectives(text):
    answered(lambda: dipole.objective(text, dim=8))


@pytest.mark.slow
@MANY
@given(SPEC)
def test_many_objectives(text):
    answered(lambda: dipole.objective(text, dim=8))


KEYS = st.one_of(
    st.sampled_from(
        ["train.steps", "train.batch_size", "objective", "seed", "domain", "train", "vision.views", "train.schedule"]
    ),
    st.text(max_size=10),
)
OVERRIDE = st.tuples(KEYS, st.one_of(VALUES, SPEC)).map("=".join)


def settle(overrides: list[str]) -> None:
    resolve(read_recipe("digits-simclr"), overrides)


@settings(FEW, max_examples=60)
@given(st.lists(OVERRIDE, max_size=3))
def test_settings(overrides):
    answered(lambda: settle(overrides))


@pytest.mark.slow
@settings(MANY, max_examples=3000)
@given(st.lists(OVERRIDE, max_size=3))
def test_many_settings(overrides):
    answered(lambda: settle(overrides))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1" * 4000 + "*dp", "a number of more than 2000 characters"),
        ("1" * 10_000 + "*dp", "too long"),
        ("dp(self=None)", "no option 'self'"),
        ("cllr(dim=10000000000)", "10000000000 x 10000000000 takes"),
        ("swav(dim=10000000000)", "GB with its gradient"),
        ("cllr(dim=" + "9" * 30 + ")", "up to 9007199254740992"),
        ("\N{ARABIC-INDIC DIGIT ONE}*dp", "cannot read"),
    ],
)
def test_sizes_and_lengths_are_refused_before_they_cost_anything(text, said):
    with pytest.raises((SpecError, OptionError), match=said):
        dipole.objective(text)


def test_long_texts_are_shown_around_the_place_and_large_sizes_work():
    text = "infonce + " * 200 + "dq + " + "infonce + " * 200 + "dp"
    with pytest.raises(SpecError) as caught:
        dipole.objective(text)
    shown, marks = str(caught.value).splitlines()[-2:]
    assert shown[marks.index("^") : marks.rindex("^") + 1] == "dq"
    assert len(shown) < 200
    assert dipole.objective("cllr(dim=64)").terms[0].L.shape == (64, 64)
    with torch.device("meta"):
        assert dipole.objective("cllr", dim=100_000).terms[0].L.shape == (100_000, 100_000)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, "a = " + "9" * 5000, "[" * 3000, "\x00", "a = 1e99999"])
def test_recipes_that_are_none(tmp_path, content):
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    answered(lambda: load(path))


@pytest.mark.parametrize("name", ["a" * 5000, "a\x00b", "/" * 300, ""])
def test_names_that_no_recipe_has(name):
    answered(lambda: read_recipe(name))


@pytest.mark.parametrize("text", ["train.steps=" + "9" * 5000, "a=" + "[" * 5000, "=" * 5000, "a." * 5000 + "b=1"])
def test_overrides_that_are_none(text):
    answered(lambda: resolve(read_recipe("digits-simclr"), [text]))
    answered(lambda: parse_override(text))


@pytest.mark.parametrize(
    "text", ["infonce \x1b[2J + 0", "infonce(\x9b=1)", "dp +\x07", "in\u202efonce", "infonce +\x00 dcl"]
)
def test_errors_of_a_text_hold_no_control_characters(text):
    """The line of the caret is as long as the text, so that the caret is under the place."""
    with pytest.raises(SpecError) as caught:
        parse(text)
    message = str(caught.value)
    assert all(each.isprintable() for each in message.replace("\n", ""))
    line, marks = message.splitlines()[1:]
    assert len(line) == 2 + len(text)
    wrong = next(place for place, each in enumerate(text) if not each.isprintable())
    assert marks.index("^") == 2 + wrong
