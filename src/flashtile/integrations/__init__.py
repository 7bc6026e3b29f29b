"""flashtile inside other libraries: one module for each, imported by name, on the public functions alone.

Importing this package imports none of those libraries.
"""
