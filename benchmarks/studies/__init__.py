"""Learning checks on real data: trained encoders beside ones that learn nothing."""
