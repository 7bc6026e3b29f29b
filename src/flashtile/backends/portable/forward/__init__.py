"""The portable forward."""
