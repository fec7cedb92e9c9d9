"""Octavo inside other libraries. Each module imports its library when it is asked to register, and no sooner."""
