"""The wire: one HTTP request and its answer, as the load generator sends and reads them; the target and the relay before it."""
