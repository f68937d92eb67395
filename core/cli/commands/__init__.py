"""Subcommands of `dipole`, a file each: a function that adds its arguments to a parser and returns what runs."""
