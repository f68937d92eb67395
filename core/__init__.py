"""Objectives, engine, measurements, runs and the command line. It imports no domain."""
