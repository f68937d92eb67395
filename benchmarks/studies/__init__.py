"""Studies that the docs quote. Run one with `python -m dipole.benchmarks.studies.NAME`."""
