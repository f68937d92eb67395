"""Modules of earlier versions that docs and tests named go on being importable, and are the very same."""

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("carry", "explain", "compatibility"),
        ("data", "ImageSet", "image_set"),
        ("data", "read_classes", "class_lists"),
        ("detectron", "backbone", "export.detectron2"),
        ("evaluation", "ProbeConfig", "probes"),
        ("export", "DipoleVisionModel", "export.transformers"),
        ("methods", "CMC", "frameworks.cmc"),
        ("methods", "MoCo", "frameworks.moco"),
        ("methods", "Queue", "frameworks.queue"),
        ("methods", "lab", "frameworks.cmc"),
        ("picture", "flat", "pictures"),
        ("planar", "SETS", "toy.planar"),
        ("stream", "Encoded", "decoding"),
        ("toy", "ToyAdapter", "toy.adapter"),
    ],
)
def test_an_old_name_is_the_new_one(old, name, new):
    found = getattr(import_module(f"dipole.vision.{old}"), name)
    assert found is getattr(import_module(f"dipole.vision.{new}"), name)
