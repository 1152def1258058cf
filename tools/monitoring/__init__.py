"""This package makes the monitoring files of helm/serve-app: rules, dashboards, and the table of series in docs/monitoring.md.

`make monitoring-files` writes them; tests/monitoring fails if a file is outdated. The files hold ``${NAME}`` in place of values: the chart
fills them in for a release, and `facts.py` does the same for `make observe` and for tests.
"""
