"""Studies that docs quote: `python -m dipole.benchmarks.studies.NAME`."""
