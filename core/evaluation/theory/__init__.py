"""Evaluate the papers' theorems: both sides of every inequality, from embeddings and labels.

`theorems.THEOREMS` lists them; `arora`, `lmcl`, `cllr` hold an equation per function, `report.measure` a whole run's.
"""
