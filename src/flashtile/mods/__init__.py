"""Mods: attention that users write, as functions of one score or one pair, traced into graphs."""
