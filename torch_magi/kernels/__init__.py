"""Attention in Triton, for GPUs that the compiled library has no kernels for. Imported where it is used."""
