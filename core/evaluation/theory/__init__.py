"""Both sides of every inequality of the papers: `theorems.THEOREMS` lists them, `report.measure` evaluates a run."""
