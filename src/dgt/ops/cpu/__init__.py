"""The native CPU backend: one C++ library without Python in it, called through `ctypes`.

`kernels/` holds its source, `library.py` finds and loads the build for this processor, `backend.py` has the
functions of tensors.
"""
