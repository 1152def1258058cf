"""Test doubles that implement real interfaces. Nothing of the product imports this package."""
