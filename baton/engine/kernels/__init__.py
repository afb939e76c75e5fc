"""What a model is computed with: a set of kernels for a device, all with the results of the plain torch ones."""
