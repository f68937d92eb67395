"""What the DeepMind Control Suite needs: its tasks by name, and something to draw with."""
