"""The wire sends one HTTP request and reads its answer for the load generator; it also has the target and the relay before it."""
