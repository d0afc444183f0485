"""The native CPU step: one C++ call computes a whole engine step (``step.cpp``), compiled on first use and cached."""
