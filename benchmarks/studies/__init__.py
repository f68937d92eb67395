"""Studies that the docs quote: suite files, and scripts `python -m dipole.benchmarks.studies.NAME`."""
