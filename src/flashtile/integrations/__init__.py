"""flashtile inside other libraries: one module for each, imported by name. They use the public functions alone.

Importing this package imports none of the libraries.
"""
