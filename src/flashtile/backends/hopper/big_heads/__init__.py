"""The forward of head dimensions past 256: columns of the output in two warpgroups."""
