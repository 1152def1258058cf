"""The control runs a load test: it drives Locust's workers, observes the target, injects faults and writes the records."""
