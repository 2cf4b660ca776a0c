"""Libraries in C and C++, through the C ABI of ``include/alchemist.h``."""

from ali.native.library import NativeLibrary

__all__ = ["NativeLibrary"]
