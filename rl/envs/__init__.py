"""Environments. A file of this folder that registers one (`@environment("mine")`) is found without being named."""
