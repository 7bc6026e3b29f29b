"""The backward of head dimensions past 256: a kernel for each gradient; two warpgroups share its columns."""
