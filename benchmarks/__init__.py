"""Suites, statistics, published numbers and reports."""
