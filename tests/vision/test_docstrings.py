"""Every public name of dipole.vision has an example in its docstring, and it runs."""

import doctest

import PIL.Image
import pytest
import torch

from dipole import vision


@pytest.mark.parametrize("name", vision.__all__)
def test_the_example_runs(name):
    value = getattr(vision, name)
    known = {"torch": torch, "PIL": PIL, **{each: getattr(vision, each) for each in vision.__all__}}
    examples = doctest.DocTestParser().get_doctest(value.__doc__, known, name, None, 0)
    assert examples.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=said.append)
    assert not said, "".join(said)
