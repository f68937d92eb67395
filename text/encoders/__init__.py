"""Encoders of sentences: the networks, and the model of transformers that exports hold."""
