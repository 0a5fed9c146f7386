"""The native kernels of layers that only predict."""
