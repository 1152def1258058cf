"""The judge decides whether a recorded run is valid, and computes its figures and their uncertainty."""
