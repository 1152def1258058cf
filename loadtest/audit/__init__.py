"""The audit: every scheduled request has one outcome, and the logs and counters of the server agree with the rows."""
