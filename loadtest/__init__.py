"""Load tests of OpenAI-style endpoints: open-loop schedules on Locust, latencies from the due time, proofs of their own."""
