"""This package makes the monitoring files of helm/serve-app: rules, dashboards, and the table of series in docs/monitoring.md.

`make monitoring-files` writes them; tests/monitoring fails when a file is not what this makes. The files hold ``${NAME}`` where
values come in: the chart fills them in for a release, `facts.py` does the same for `make observe` and for tests.
"""
