"""What is soaked: a run of seconds in each domain, with checkpoints often enough that every fault finds one."""

from collections.abc import Mapping

SUITE = """\
name = "soak"
title = "A small run in each domain, under faults"
kind = "study"

[[columns]]
name = "vision"
metric = "kmeans/accuracy"
recipe = "digits-simclr"
set = ["train.epochs=4", "train.batch_size=128", "train.checkpoint_every=1", "train.evaluate_every=2",
       "train.log_every=1", "vision.probe.baselines=false", "vision.probe.probes=['kmeans']"]

[[columns]]
name = "text"
metric = "next@10"
recipe = "pydoc-bow"
set = ["train.epochs=4", "train.checkpoint_every=1", "train.log_every=1"]

[[columns]]
name = "rl"
metric = "return/mean"
recipe = "dot"
set = ["train.steps=1000", "train.checkpoint_every=100", "train.evaluate_every=500", "train.log_every=20",
       "rl.episodes=2", "rl.learning_starts=200", "rl.buffer_size=600"]

[[rows]]
method = "infonce + 0.1*dp"
objective = "infonce + 0.1*dp"

[scale.small]
seeds = [0]
"""
LONG: Mapping[str, tuple[str, ...]] = {
    "vision": ("digits-simclr", "train.epochs=", "train.batch_size=32", "vision.probe.baselines=false",
               "vision.probe.probes=['kmeans']", "train.warmup=0"),
    "text": ("pydoc-bow", "train.epochs=", "train.batch_size=32"),
    "rl": ("dot", "rl.learning_starts=200", "rl.buffer_size=500", "rl.episodes=1"),
}  # fmt: skip
"""The smallest recipe of each domain and its settings, for many updates: does its memory grow?"""
