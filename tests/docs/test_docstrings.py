"""Every public name of dipole.vision and dipole.evaluation has an example in its docstring, and it runs."""

import doctest

import PIL.Image
import pytest
import torch

from dipole import evaluation, vision

NAMES = [(module, name) for module in (vision, evaluation) for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_example_runs(module, name):
    value = getattr(module, name)
    known = {"torch": torch, "PIL": PIL, **{each: getattr(module, each) for each in module.__all__}}
    examples = doctest.DocTestParser().get_doctest(value.__doc__, known, name, None, 0)
    assert examples.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=said.append)
    assert not said, "".join(said)
