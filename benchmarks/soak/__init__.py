"""Soak test: run a small suite under faults and compare it with an undisturbed run."""
