"""Recipes, overrides, error messages, hashes."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from dipole.core.train.config import Settings, toml_text
from dipole.core.train.recipe import UNSET, describe, load, parse_override, read_recipe, resolve
from dipole.core.utils.errors import ConfigError


def problems(*overrides: str, recipe: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    return str(caught.value)


def test_precedence_and_origins(blobs):
    resolved = load(blobs, ["train.learning_rate=0.5", "blobs.noise=0.1"])
    train = resolved.config.train
    assert (train.learning_rate, resolved.config.settings.noise) == (0.5, 0.1)
    assert (train.batch_size, train.optimizer) == (16, "adam")
    names = ("train.learning_rate", "train.batch_size", "train.optimizer", "blobs.points")
    assert [resolved.origins[name] for name in names] == ["--set", "recipe", "default", "default"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=1e-3", 1e-3),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b="3"', "3"),
        ("a.b=cosine", "cosine"),
        ("a.b=infonce(temperature=0.5) + 0.1*dp", "infonce(temperature=0.5) + 0.1*dp"),
        ("a.b=x=y", "x=y"),
        ("a.b=", UNSET),
        ("a.b= null", None),
        ("a.b=None", None),
        ('a.b="null"', "null"),
        ('a.b=""', ""),
        ("a.b=1\nc=2", "1\nc=2"),
    ],
)
def test_override_values_are_toml_and_else_text(text, value):
    assert parse_override(text) == (("a", "b"), value)


def test_an_empty_override_takes_the_recipes_value_away(blobs):
    resolved = load(
        blobs, ["train.steps=", "train.epochs=2", "train.best_by=null", "train.batch_size= ", "blobs.noise="]
    )
    assert (resolved.config.train.steps, resolved.config.train.epochs) == (None, 2)
    assert (resolved.config.train.batch_size, resolved.origins["train.batch_size"]) == (256, "default")
    assert resolved.config.settings.noise == 0.3


def test_carets_stay_under_their_place(blobs):
    lines = problems("objective=infonce + dp(delta_pos=2)", recipe=blobs).splitlines()
    place = next(number for number, line in enumerate(lines) if "^" in line)
    assert lines[place - 1].index("delta_pos") == lines[place].index("^")
    assert lines[place].strip("^ ") == ""


def test_every_problem_is_in_one_message(blobs):
    wrong = {
        "train.learning_rte=0.1": "train.learning_rte: no such setting. Did you mean 'learning_rate'?",
        "train.optimizer=adan": "train.optimizer: 'adan' is not allowed. Did you mean 'adam'? Allowed: adam,",
        "train.batch_size=16.5": "train.batch_size: should be a valid integer, got 16.5.",
        "train.clip=-1": "train.clip: should be greater than 0, got -1.",
        "blobs.nois=1": "blobs.nois: no such setting. Did you mean 'noise'? Allowed: points, classes",
        "blobs.dropout=1": "blobs.dropout: should be less than 1, got 1.",
        "objective=infonse": "Did you mean 'infonce'?",
        "oops": "'oops' is not of the form key=value",
    }
    message = problems(*wrong, recipe=blobs)
    assert "8 problems" in message
    assert all(said in message for said in wrong.values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.momentum=0.9", "momentum has no effect with optimizer 'adam'"),
        ("train.milestones=[1,2]", "no effect with schedule 'constant'"),
        ("train.schedule=step", "needs milestones"),
        ("train.epochs=3", "give either epochs or steps, not both"),
        ("train.warmup=11", "longer than the run"),
        ("domain=visoin", "Did you mean 'vision'?"),
        ("device=gpu", "device: "),
        ("objective=none", "'none' is not possible in the domain 'blobs'"),
        ("objective=infonce(temperature=0)", "temperature"),
        ("train.steps.lr=3", "is a value, not a table"),
        ('train.batch_size="16"', "should be a valid integer"),
        ("deterministic=1", "should be a valid boolean"),
        ("train.learning_rate=nan", "finite"),
        ("learning_rate=1", "learning_rate: no such setting at the top level; did you mean train.learning_rate?"),
    ],
)
def test_settings_that_are_wrong_or_do_not_go_together(blobs, override, message):
    assert message in problems(override, recipe=blobs)


def test_whole_numbers_are_numbers(blobs):
    assert load(blobs, ["train.learning_rate=1"]).config.train.learning_rate == 1.0


def test_dependent_defaults_are_filled_in_and_frozen(blobs):
    config = load(blobs).config
    assert (config.train.betas, config.train.momentum, config.train.decay) == ((0.9, 0.999), None, None)
    sgd = load(blobs, ["train.optimizer=sgd", "train.schedule=step", "train.milestones=[1.0]"]).config.train
    assert (sgd.momentum, sgd.betas, sgd.decay) == (0.9, None, 0.1)
    assert load(blobs, ["train.precision=32"]).config.train.precision == "32"
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.optimizer=lars", "train.schedule=step", "train.milestones=[2, 5.5]", "blobs.scales=[1, 2.5e-9]"],
        ["train.learning_rate=1e-7", "objective=infonce(temperature=0.07)+dp+0.25*cllr(norm=nuclear)"],
        ['name="quo\\"te \\\\ back\\nslash \\u007f \\u00e9"', "train.clip=1e22"],
    ],
)
def test_stored_text_reads_back_to_the_same_configuration(blobs, overrides):
    config = load(blobs, overrides).config
    again = resolve(tomllib.loads(config.to_toml())).config
    assert (again, again.hash) == (config, config.hash)


def test_hash_is_stable_across_processes_and_versions():
    # Written down once: a change means that finished runs are run again, and needs a line in the change log.
    assert resolve({"domain": "toy", "train": {"steps": 3}}).config.hash == "e9af96d7ce17"


def test_unknown_recipe_and_broken_file(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown recipe 'nothing-here'.*dipole|Shipped"):
        read_recipe("nothing-here")
    with pytest.raises(ConfigError, match="no recipe file"):
        read_recipe(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 3")
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML.*line 1"):
        read_recipe(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_recipe(broken)


def test_nested_tables_are_named_by_their_path():
    class Inner(Settings):
        kind: str = Field("a", pattern="^[ab]$")

    class Outer(Settings):
        inner: Inner = Inner()

    with pytest.raises(ValueError, match="1 validation error") as caught:
        Outer.model_validate_json('{"inner": {"knd": "a"}}')
    assert describe(caught.value, Outer) == ["inner.knd: no such setting. Did you mean 'kind'? Allowed: kind."]


scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
tables = st.recursive(
    st.dictionaries(st.text(), scalars | st.lists(scalars | st.lists(scalars, max_size=2), max_size=3), max_size=4),
    lambda inner: st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(tables)
def test_any_table_survives_toml(table):
    try:
        text = toml_text(table)
        text.encode()
    except UnicodeEncodeError:
        return
    assert tomllib.loads(text) == table
