"""What is in use of the native CPU kernels: ``dgt.native.status()``."""

from dgt.ops.native.library import NativeStatus, status

__all__ = ["NativeStatus", "status"]
