"""The load-test kit tests OpenAI-style endpoints: open-loop schedules on Locust, latencies from the due time, and self-tests."""
