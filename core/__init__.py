"""Objectives, engine, measurements, runs and the command line; no domain."""
