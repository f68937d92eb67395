"""Environments while they run: what happens when one fails, and processes of their own."""
