"""What is in use of the native CPU kernels: ``dgt.native.status()``."""

from dgt.ops.cpu.library import NativeStatus, status

__all__ = ["NativeStatus", "status"]
