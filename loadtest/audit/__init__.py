"""The audit checks that each scheduled request has one outcome, and that the server's logs and counters agree with the rows."""
