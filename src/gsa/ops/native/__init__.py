"""The native CPU engine: a C++ library (csrc/) behind ctypes."""
