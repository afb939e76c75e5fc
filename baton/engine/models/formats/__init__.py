"""Weight formats of quantised checkpoints.

Read `base` first: a format returns a layer as integer levels, which kernels may hold packed, or as a widened tensor.
`select` finds the format that config.json declares. Each other file reads one format or one kind of number.
"""
