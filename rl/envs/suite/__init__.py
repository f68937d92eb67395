"""Tasks of the DeepMind Control Suite by name, and rendering."""
