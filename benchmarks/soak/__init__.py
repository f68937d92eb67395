"""A suite of three domains under faults, for as long as one likes: what comes out must be what comes out in peace."""
