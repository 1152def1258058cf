"""Shortcuts make the common request cheaper. Without this folder every answer is the same, only slower."""
