"""Training: from a recipe to a finished run. Start reading at `run.py`."""
