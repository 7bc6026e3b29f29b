"""The backward of head dimensions past 256: a kernel for each gradient, whose columns two warpgroups share."""
