"""The report: figures and one HTML page, drawn from what a run left on disk."""
