"""Images: data, views, encoders, frameworks and probes; and LMCL's planar study (`toy`)."""
